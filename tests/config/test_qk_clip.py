"""Rules about QK-clip."""

import dataclasses

import pytest

from jaxpar.config import ConfigError, QkNorm, replace
from jaxpar.config.validate import check
from tests.config.models import BASE, DELTA, LAYER, OF_EXPERTS

GOOD = replace(BASE, **{"optimizer.qk_clip": 100.0})


FIRST = dataclasses.replace(LAYER, name="dense_layers")


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"optimizer.name": "muon", "model.layers.mixer.bias": True}))
    check(replace(GOOD, **{"model.layers": [DELTA, LAYER]}))
    check(replace(GOOD, **{"optimizer.offload": True, "parallel.context": "ring"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer.qk_clip": -1.0}, r"qk_clip = -1.0: must not be negative"),
        (
            {"model.layers.mixer.qk_norm": QkNorm()},
            r"qk_norm = 'QkNorm': .* queries and keys are normalized",
        ),
        ({"lora.rank": 4}, r"lora.rank = 4: is not supported with optimizer.qk_clip"),
        ({"model.mtp_depth": 1}, r"mtp_depth = 1: .*: attention in modules is not clipped"),
        (
            {"model.layers": [FIRST] + [OF_EXPERTS] * 3, "parallel.pipeline": 3},
            r"layers = 'dense_layers, layers': .*: layers before the stages are not clipped",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **fields))
