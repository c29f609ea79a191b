"""Rules about QK-clip."""

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check

GOOD = replace(Config(), **{"optimizer.qk_clip": 100.0})


def test_what_may_be():
    check(GOOD)
    check(replace(GOOD, **{"optimizer.name": "muon", "model.qkv_bias": True}))
    check(replace(GOOD, **{"optimizer.offload": True, "parallel.context": "ring"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer.qk_clip": -1.0}, r"qk_clip = -1.0: must not be negative"),
        ({"model.qk_norm": True}, r"qk_norm = True: .* queries and keys are normalized"),
        ({"lora.rank": 4}, r"lora.rank = 4: is not supported with optimizer.qk_clip"),
        ({"model.mtp_depth": 1}, r"mtp_depth = 1: .*: attention in modules is not clipped"),
        (
            {"model.layer_pattern": "G*", "parallel.layer_loop": "unroll"},
            r"layer_pattern = 'G\*': .*: it rescales the weights of one kind",
        ),
        (
            {
                "model.num_experts": 4,
                "model.dense_layers": 1,
                "parallel.pipeline": 3,
                "parallel.layer_loop": "unroll",
            },
            r"dense_layers = 1: .*: layers before the stages are not clipped",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(GOOD, **fields))
