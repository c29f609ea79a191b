"""The fused weight layout: which matrices are concatenated, and when."""

import jax
import numpy as np
import pytest

from jaxpar.config import Attention, Config, Glu, Layer, Model, ParallelConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.model import fused_weights
from jaxpar.model.parameters import param_specs
from tests.tiny import EXPERTS

LAYER = Layer("layers", Attention(num_heads=2, num_kv_heads=2, head_dim=8), Glu(32))
SMALL = Model(d_model=16, vocab_size=32, layers=[LAYER] * 2)
BASE = Config(model=SMALL, parallel=ParallelConfig(layer_loop="unroll"))


def first_layer(cfg: Config) -> dict:
    """The first layer of numbered parameters, fused."""
    cfg = resolve(cfg, 1)
    shapes = jax.tree.map(lambda s: s.shape, param_specs(cfg.model, cfg.lora), is_leaf=is_spec)
    sizes = jax.tree.map(np.prod, shapes, is_leaf=lambda x: isinstance(x, tuple))
    numbered = jax.tree.map(
        lambda shape, n: np.arange(n, dtype=np.float32).reshape(shape),
        *(shapes, sizes),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return fused_weights.fuse(numbered, execution_of(cfg))["layers"][0][0] | {
        "stored": numbered["layers"]
    }


def is_spec(leaf) -> bool:
    return hasattr(leaf, "axes")


@pytest.mark.parametrize("dtype", ["compute", "float8"])
def test_gate_lies_before_up(dtype):
    w = first_layer(replace(BASE, **{"compute.matmul_dtype": dtype, "compute.dtype": "bfloat16"}))
    np.testing.assert_array_equal(w["w_gate_up"][:, :32], w["stored"]["w_gate"][0])
    np.testing.assert_array_equal(w["w_gate_up"][:, 32:], w["stored"]["w_up"][0])
    assert not {"w_gate", "w_up"} & set(w)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "compute.matmul_dtype": "float8",
            "compute.float8_scaling": "row",
            "compute.dtype": "bfloat16",
        },
        {"model.layers.feed_forward.activation": "gelu"},
        {"model.layers.feed_forward.bias": True},
        {"model.layers.feed_forward": EXPERTS},
        {"parallel.row_groups": 2, "train.global_batch_size": 2},
    ],
    ids=["float8 by row", "gelu", "bias", "experts", "turns"],
)
def test_where_gate_and_up_are_two(fields):
    w = first_layer(replace(BASE, **fields))
    assert {"w_gate", "w_up"} <= set(w) and "w_gate_up" not in w
