"""Where a layer's norms are written as they are, unscaled, or not at all."""

import jax
import pytest

from jaxpar.kernels.norm import Normed, Unscaled
from jaxpar.model import layer, row_groups
from tests.meshes.test_float8 import lowered_step, on_mesh

COMPUTE = {"model__matmul_dtype": "compute"}


@pytest.mark.parametrize(
    ("item", "fields", "kind"),
    [
        ("data=2", {}, Normed),
        ("sequence=2,zero=1", {}, Normed),
        ("data=2", {"model__float8_scaling": "row"}, jax.Array),
        ("tensor=2", {}, jax.Array),
        ("data=2", {"lora__rank": 2}, jax.Array),
        ("data=2", COMPUTE, Unscaled),
        ("pipeline=2,zero=1", COMPUTE | {"model__dtype": "bfloat16"}, Unscaled),
        ("data=2", COMPUTE | {"model__dtype": "float16"}, jax.Array),
        ("tensor=2", COMPUTE, jax.Array),
        ("data=2", COMPUTE | {"lora__rank": 2}, jax.Array),
        ("data=2", COMPUTE | {"model__activation": "gelu"}, jax.Array),
        ("data=2", COMPUTE | {"model__qkv_bias": True}, jax.Array),
        ("data=2", COMPUTE | {"model__num_experts": 4}, jax.Array),
    ],
    ids=[
        *("float8", "float8, sequence", "float8, by row", "float8, tensor", "float8, adapters"),
        *("float32", "bfloat16, stages", "float16", "tensor", "adapters", "GELU", "bias"),
        "experts",
    ],
)
def test_what_matmuls_are_given_of_a_norm(item, fields, kind, devices, monkeypatch):
    cfg, mesh = on_mesh(item, devices, **fields)
    seen = []

    def normed_pieces(x, w, name, cfg, original=layer.normed_pieces):
        x, hs = original(x, w, name, cfg)
        seen.extend((name, isinstance(h, kind)) for h in hs)
        return x, hs

    monkeypatch.setattr(layer, "normed_pieces", normed_pieces)
    monkeypatch.setattr(row_groups, "normed_pieces", normed_pieces)
    lowered_step(cfg, mesh)
    assert set(seen) == {("attn_norm", True), ("mlp_norm", True)}
