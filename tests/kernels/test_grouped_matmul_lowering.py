"""The Hopper kernels of experts, lowered for CUDA on a CPU at the shapes that are trained with."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.kernels.float8 import BACKWARD, FORWARD
from jaxpar.kernels.glu import ClampedSwiGLU, SwiGLU
from jaxpar.kernels.grouped_matmul import hopper, max_rows
from jaxpar.kernels.grouped_matmul.capability import refusal_in_float8, refusal_of_rows
from jaxpar.kernels.grouped_matmul.tiles import Tiles
from jaxpar.kernels.platform import Platform
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow_but

HOPPER = Platform("gpu", "NVIDIA H100", "9.0")

#: Name: rows, experts, D, F. Models, and one with F cut over tensor = 2.
SHAPES = {
    "qwen3": (131072, 128, 2048, 768),
    "mixtral": (32768, 8, 4096, 14336),
    "olmoe": (131072, 64, 2048, 1024),
    "gpt-oss": (65536, 32, 2880, 2880),
    "qwen3 over tensor": (131072, 128, 2048, 384),
    "nemotron 3": (98304, 128, 2688, 1856),
}


def shapes_of(name: str, dtype=jnp.bfloat16):
    rows, E, D, F = SHAPES[name]
    R = max_rows(rows, E, 128)
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return Tiles(int32(R // 128), int32(E + 1), int32(1)), array, R, E, D, F


def lower(fn, *arguments):
    """The result's shapes, after lowering for CUDA."""
    traced = jax.jit(fn).trace(*arguments)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text(), "no kernel of ours"
    return traced.out_info


@pytest.mark.parametrize("name", slow_but(["qwen3"], SHAPES))
@pytest.mark.parametrize("expert_dim", slow_but([1], [0, 1]))
def test_products(name, expert_dim):
    tiles, array, R, E, D, F = shapes_of(name)
    w = array(D, E, F) if expert_dim else array(E, D, F)
    product = lambda transpose, *terms: lower(  # noqa: E731
        functools.partial(hopper.grouped_matmul, transpose=transpose, expert_dim=expert_dim),
        *terms,
        tiles,
    )
    assert product(False, (array(R, D),), (w,)).shape == (R, F)
    assert product(True, (array(R, F),) * 2, (w, w)).shape == (R, D)
    outer = functools.partial(hopper.grouped_outer, expert_dim=expert_dim, dtype=jnp.float32)
    assert lower(outer, array(R, D), array(R, F), tiles).shape == w.shape


@pytest.mark.parametrize("name", slow_but(["qwen3"], SHAPES))
@pytest.mark.parametrize("expert_dim", slow_but([0], [0, 1]))
def test_products_in_float8(name, expert_dim):
    tiles, _, R, E, D, F = shapes_of(name)
    if refusal_in_float8(D, F, "bfloat16", HOPPER) or refusal_in_float8(F, D, "bfloat16", HOPPER):
        pytest.skip("the reference multiplies these rows")
    array = jax.ShapeDtypeStruct
    product = functools.partial(hopper.scaled_matmul, expert_dim=expert_dim, dtype=jnp.bfloat16)
    of_rows = array((R,), jnp.float32)
    for K, N, dtype, terms in ((D, F, FORWARD, 1), (F, D, FORWARD, 1), (F, D, BACKWARD, 2)):
        w = array((N, E, K) if expert_dim else (E, N, K), FORWARD)
        x = array((R, K), dtype)
        assert lower(product, (x,) * terms, (w,) * terms, of_rows, tiles).shape == (R, N)


@pytest.mark.parametrize("name", slow_but(["qwen3"], SHAPES))
def test_passes_in_float8(name):
    tiles, array, R, _, D, F = shapes_of(name)
    if any(refusal_of_rows(width, "bfloat16", HOPPER) for width in (D, F)):
        pytest.skip("XLA rounds these rows")
    scale, token = (jax.ShapeDtypeStruct((R,), dtype) for dtype in (jnp.float32, jnp.int32))
    wide, sized = array(R, F), lambda made: [a.shape for a in made]
    take = functools.partial(hopper.rows_taken_in_float8, dtype=BACKWARD, keep=True)
    assert sized(lower(take, (array(8192, D),) * 2, token, tiles)) == [(R, D), (R,), (R, D)]
    forward = functools.partial(hopper.swiglu_in_float8, dtype=FORWARD)
    assert sized(lower(forward, wide, wide, scale, tiles)) == [(R, F), (R,)]
    backward = functools.partial(hopper.swiglu_backward_in_float8, dtype=BACKWARD)
    made = [(R, F)] * 3 + [(R,)] + [(R, F)] * 2 + [(R,)]
    assert sized(lower(backward, wide, wide, wide, scale, tiles)) == made


@pytest.mark.parametrize("name", slow_but(["gpt-oss"], SHAPES))
def test_passes(name):
    tiles, array, R, E, D, F = shapes_of(name)
    scale = jax.ShapeDtypeStruct((R,), jnp.float32)
    wide = [array(R, F)] * 3
    bias = jax.ShapeDtypeStruct((E, F), jnp.float32)
    for glu, biases in (SwiGLU(), (None, None)), (ClampedSwiGLU(7.0, 1.702), (bias, bias)):
        backward = functools.partial(hopper.glu_backward, glu)
        made = lower(backward, *wide, scale, tiles, biases)
        assert [a.shape for a in made] == [(R, F)] * 3 + [(R,)]
        if F % 128 == 0:
            hidden = functools.partial(hopper.glu_hidden, glu)
            assert lower(hidden, *wide[:2], scale, tiles, biases).shape == (R, F)
    if D % 128:
        return
    rows = jax.ShapeDtypeStruct((16384, 8), jnp.int32)
    assert lower(hopper.rows_added, array(R, D), rows).shape == (16384, D)
    token = jax.ShapeDtypeStruct((R,), jnp.int32)
    for parts in (1, 4):
        x = (array(16384 // parts, D),) * parts
        assert lower(hopper.rows_taken, x, token, tiles).shape == (R, D)


def test_results_vary_over_the_mesh_as_their_operands_do(devices):
    mesh = make_mesh(ParallelConfig(data=2), devices[:2])
    tiles, array, R, E, D, F = shapes_of("qwen3 over tensor", jnp.float16)

    def local(x, w, tiles, rows):
        x = hopper.rows_taken((x,), jnp.repeat(tiles.expert, 128), tiles)
        y = hopper.grouped_matmul((x,), (w,), tiles, transpose=False, expert_dim=0)
        made = hopper.glu_backward(SwiGLU(), y, y, y, y[:, 0].astype(jnp.float32), tiles)
        d_w = hopper.grouped_outer(x, made[1], tiles, expert_dim=0, dtype=jnp.float32)
        return y, d_w, made[3], hopper.rows_added(x, rows)

    split = PartitionSpec("data")
    of_each = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
    double = lambda a: jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype)  # noqa: E731
    rows = jax.ShapeDtypeStruct((512, 8), jnp.int32)
    given = jax.tree.map(double, (array(R, D), array(E, D, F), tiles, rows))
    assert lower(of_each, *given)[1].shape == (2 * E, D, F)
