"""Collective matmuls: they take one tensor rank's shard of the sequence at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.certification import small_config
from jaxpar.config import Attention, Config, Glu, Layer, Model, ParallelConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.platform import Platform
from jaxpar.model import attention_context, layer
from jaxpar.parallel.tensor import permutes
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import AXES, TENSOR
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from tests.parallel.test_collectives import N, mesh_of, normal, per_device

B, T, D, F = 2, 32, 24, 80
"""Rows, tokens, width and feed-forward; no two products of them, cut by ranks, are alike."""


def test_shards_come_in_ring_order(devices):
    x = normal(N, 2, 4)
    found = per_device(lambda x: permutes.gather_shards(x, TENSOR), mesh_of(devices, TENSOR), x)
    for step, shard in enumerate(found):
        np.testing.assert_array_equal(shard, np.roll(x, -step, axis=0))
    back = lambda x: permutes.concatenate_shards(permutes.split_shards(x, TENSOR, 1), TENSOR, 1)  # noqa: E731
    np.testing.assert_array_equal(per_device(back, mesh_of(devices, TENSOR), x), x)


@pytest.mark.parametrize("tensor", [2, 4])
def test_what_is_computed_of_shards_is_what_is_computed_of_the_whole(tensor, devices):
    """And so are both transposes."""
    mesh = make_mesh(ParallelConfig(data=1, tensor=tensor), devices[:tensor])
    x = normal(tensor, 2, 4, 3)

    def by_shards(x):
        shards = Shards.gather(x, in_shards=True).each(jnp.sin)
        assert len(shards.parts) == tensor
        return shards.split(shards.in_order()).reduce_scatter()

    def whole(x):
        return Shards.gather(x, in_shards=False).each(jnp.sin).reduce_scatter()

    def both(fn):
        return lambda x, d: (fn(x), jax.vjp(fn, x)[1](d)[0])

    d = normal(*x.shape, seed=1)
    found, wanted = (per_device(both(fn), mesh, x, d) for fn in (by_shards, whole))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


TOKENS = {"data.seq_len": 4096, "train.global_batch_size": 16}


@pytest.mark.parametrize(
    ("fields", "on_gpu", "wanted"),
    [
        ({"data": 4, "tensor": 2}, True, True),
        ({"data": 4, "tensor": 2, "num_microbatches": 4}, True, False),  # of 2,048 tokens
        ({"data": 4, "tensor": 2, "num_microbatches": 4}, False, True),
        ({"data": 1, "sequence": 2, "tensor": 4, "num_microbatches": 2}, True, True),
        ({"data": 1, "sequence": 2, "tensor": 4, "num_microbatches": 4}, True, False),
        ({"data": 2, "tensor": 2, "pipeline": 2}, False, False),
        ({"data": 4, "tensor": 2, "row_groups": 2}, False, False),
        ({"data": 8}, False, False),
    ],
)
def test_where_matmuls_take_pieces(fields, on_gpu, wanted):
    parallel = {f"parallel.{name}": value for name, value in fields.items()}
    cfg = replace(Config(), **TOKENS, **parallel)
    ex = execution_of(cfg, Platform("gpu" if on_gpu else "cpu"))
    assert ex.collective_matmul == wanted
    assert ex.weight_uses == (cfg.parallel.tensor if wanted else fields.get("row_groups", 1))


def shapes_of(jaxpr):
    """Shapes of all that the equations of a jaxpr make, those of its inner ones among them."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                    yield from shapes_of(getattr(item, "jaxpr", item))


def shapes_in_a_layer(devices, tensor: int, **fields) -> set[tuple[int, ...]]:
    """Of a layer's forward and backward on one device."""
    block = Layer("layers", Attention(num_heads=4, num_kv_heads=4, head_dim=4), Glu(F))
    model = {"model": Model(d_model=D, vocab_size=512, layers=[block] * 2)}
    batch_size = {"data.seq_len": T, "train.global_batch_size": B}
    parallel = {"parallel.tensor": tensor, "parallel.layer_loop": "unroll"}
    cfg = replace(small_config.float32(Config()), **model, **batch_size, **parallel, **fields)
    cfg = resolve(cfg, tensor * cfg.parallel.pipeline)
    heads = 4 // tensor * 4
    w = {"wqkv": (D, 3 * heads), "wo": (heads, D), "attn_norm": (D,), "mlp_norm": (D,)}
    w |= {"w_gate": (D, F // tensor), "w_up": (D, F // tensor), "w_down": (F // tensor, D)}

    def run(x, w):
        ints = jnp.zeros((B, T), jnp.int32)
        contexts = attention_context.attention_context(Batch(ints, ints, ints, ints), cfg, None)
        of = cfg.model.layers[0]
        context = attention_context.context_of_layer(contexts, of)
        one = functools.partial(layer.layer, context=context, ex=execution_of(cfg))
        y, vjp = jax.vjp(one, x, w)
        return vjp(y)

    mesh = make_mesh(cfg.parallel, devices[: tensor * cfg.parallel.pipeline])
    x = jax.ShapeDtypeStruct((B, T * cfg.parallel.pipeline, D), jnp.float32)  # T over all axes
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in w.items()}
    cut = PartitionSpec(None, AXES), PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    return set(shapes_of(jax.make_jaxpr(mapped)(x, weights).jaxpr.eqns[0].params["jaxpr"]))


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (1, 4), (2, 2)])
def test_what_ranks_hold_of_the_sequence_is_side_by_side_only_in_stages(pipeline, tensor, devices):
    """Neither the norms' outputs nor hidden values nor partial sums; what attention is given is."""
    made = shapes_in_a_layer(devices, tensor, **{"parallel.pipeline": pipeline})
    in_pieces = pipeline == 1
    assert ((B, T, D) in made) == ((B, T, F // tensor) in made) == (not in_pieces)
    assert ((B, T // tensor, F // tensor) in made) == in_pieces
    assert (B, T // tensor, D) in made
    assert (B, T, 4 // tensor, 4) in made
