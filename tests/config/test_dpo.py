"""Rules about preference tuning."""

import pytest

from jaxpar.config import ConfigError, Source, replace
from jaxpar.config.validate import check
from tests.config.models import BASE, EXPERTS

GOOD = replace(BASE, **{"dpo.beta": 0.1, "dpo.label_smoothing": 0.1, "dpo.too_long": "drop"})


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"lora.rank": 4, "model.logits_softcap": 30.0}))
    check(replace(GOOD, **{"model.layers.feed_forward": EXPERTS, "train.balance_loss": 1e-2}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dpo.beta": 0.0}, r"beta = 0.0: must be above 0.*--dpo.beta 0.1, or --dpo None\."),
        ({"dpo.label_smoothing": 0.5}, r"label_smoothing = 0.5: must be at least 0 and below 0.5"),
        (
            {"data.document_mask": False},
            r"document_mask = False: .*: two responses",
        ),
        (
            {"data.mixture": (Source("a", 1.0), Source("b", 1.0))},
            r"mixture = 'a:1.0,b:1.0': .*: pairs come",
        ),
        (
            {"data.loss_on": "all"},
            r"loss_on = 'all': .*: the loss of pairs",
        ),
        (
            {"train.z_loss": 1e-4},
            r"z_loss = 0.0001: .*: the loss of pairs",
        ),
        (
            {"model.mtp_depth": 1},
            r"mtp_depth = 1: .*: the loss of pairs",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **fields))
