"""Sizes that GPUs multiply slowly get a hint."""

import re

import pytest

from jaxpar.config import Attention, Config, Experts, Glu, Layer, Model, replace
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.prediction.startup import alignment_hints

D_FF = "model.layers.feed_forward.d_ff"


ATTENTION = Attention(num_heads=32, num_kv_heads=8, head_dim=128)


def aligned() -> Config:
    """A composed model of sizes that are fast."""
    layer = Layer("layers", ATTENTION, Glu(14336))
    return Config(model=Model(d_model=4096, vocab_size=128256, layers=[layer] * 2))


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"model.vocab_size": 50257}, "vocab_size = 50,257: multiples of 8 .*, such as 50,304"),
        ({D_FF: 11007}, f"{D_FF} = 11,007: multiples of 8 .*, such as 11,008"),
        ({"model.d_model": 4095}, "d_model = 4,095: .*, such as 4,096"),
        (
            {D_FF: 11040, "parallel.tensor": 8},
            f"{D_FF} = 11,040, 1,380 on a device: .* such as 11,264",
        ),
        ({"compute.matmul_dtype": "float8", D_FF: 14408}, "multiples of 16 .* 14,464"),
        ({"compute.dtype": "float32", D_FF: 14350}, "multiples of 4 .* 14,368"),
    ],
)
def test_an_odd_size_gets_a_hint(fields, hint):
    (line,) = alignment_hints(replace(aligned(), **fields))
    assert re.search(hint, line)


def test_each_layer_and_its_experts_get_one():
    """Also a dense layer before those with experts; whole experts are not split by tensor ranks."""
    experts = Experts(expert=Glu(1032), num_experts=8, experts_per_token=2, num_shared_experts=2)
    layers = [Layer("dense", ATTENTION, Glu(11007)), Layer("moe", ATTENTION, experts)]
    cfg = replace(aligned(), **{"model": Model(d_model=4096, vocab_size=128256, layers=layers)})
    said = [line.partition(":")[0] for line in alignment_hints(cfg)]
    assert said == ["model.dense.feed_forward.d_ff = 11,007"]
    split = replace(cfg, **{"parallel.tensor": 2, "model.dense.feed_forward.d_ff": 11008})
    (line,) = alignment_hints(split)
    expert = "model.moe.feed_forward.expert.d_ff = 1,032"
    assert line.startswith(f"{expert}, 516 on a device: ") and line.endswith("such as 1,152")
    assert alignment_hints(replace(split, **{"parallel.expert_tensor": 1})) == []


@pytest.mark.parametrize("name", known_configs().split(", "))
def test_our_configs_need_none(name):
    assert alignment_hints(load_config(name)) == []
