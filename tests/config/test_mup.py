"""What µP is refused with, and the fix."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check
from jaxpar.extend import UpdateRule
from tests.config.models import BASE, DELTA, LATENT, LAYER

MUP = {"model.mup.base_width": 64}

HYBRID = {"model.layers": [DELTA] * 3 + [LAYER]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model.mup.base_width": 0}, r"base_width = 0: must be at least 1.*base-width 256"),
        ({"model.mup.base_d_ff": 0}, r"base_d_ff = 0: must be at least 1.*base-d-ff 704"),
        ({"model.mup.base_depth": -1}, r"base_depth = -1: must be at least 1.*base-depth 4"),
        ({"optimizer.name": "sgd"}, r"'sgd': .* it has no learning rate by width.*name adamw"),
        ({"model.embed_scale": True}, r"embed_scale = True: .*: it grows with the width"),
        (
            {"model.mtp_depth": 1},
            r"mtp_depth = 1: .* modules read hidden states.*--model\.mup None",
        ),
        (HYBRID, r"delta_layers.mixer = .*µP's factors do not hold for them"),
        (
            {"model.layers.mixer": LATENT, "model.mup.base_head_dim": 32},
            r"base_head_dim = 32: is not supported with model.layers.mixer = LatentAttention",
        ),
    ],
)
def test_what_cannot_be(fields, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **(MUP | fields)))


def test_a_rule_of_a_user_is_refused():
    with pytest.raises(ConfigError, match=r"UpdateRule'?: .* it has no learning rate by width"):
        check(replace(BASE, **MUP, **{"optimizer.name": UpdateRule()}))


def test_a_config_is_saved_with_its_base_model():
    cfg = replace(BASE, **MUP, **{"model.mup.base_d_ff": 96})
    check(cfg)
    assert from_json(to_json(cfg)) == cfg and from_json(to_json(BASE)).model.mup is None
