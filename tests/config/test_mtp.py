"""Rules about multi-token prediction."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from tests.config.models import BASE, DELTA, EXPERTS, LAYER

GOOD = replace(BASE, **{"model.mtp_depth": 2, "train.mtp_loss": 0.3})


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"model.layers": [DELTA, LAYER]}))
    experts = {"model.layers.feed_forward": EXPERTS, "train.global_batch_size": 8}
    check(replace(GOOD, **experts))
    check(replace(GOOD, **experts, **{"parallel.pipeline": 2, "parallel.num_microbatches": 2}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.mtp_depth": 0}, r"mtp_loss = 0.3: needs modules of multi-token prediction"),
        ({"model.mtp_depth": 9}, r"mtp_depth = 9: must be at most 8"),
        ({"model.mtp_depth": 2, "data.seq_len": 2}, r"mtp_depth = 2: .*below data.seq_len = 2"),
        ({"train.mtp_loss": 0.0}, r"mtp_loss = 0.0: must be above 0, or model.mtp_depth 0"),
        (
            {"model.logits_scaling": 2.0},
            r"logits_scaling = 2.0: is not supported with model.mtp",
        ),
        ({"lora.rank": 4}, r"lora.rank = 4: is not supported with model.mtp_depth = 2"),
        (
            {"model.layers": [LAYER, DELTA]},
            r"layers = 'layers, delta_layers': is not supported with model.mtp_depth = 2: a module",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **fields))
