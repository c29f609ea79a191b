"""The elementwise kernels on a CPU: interpreted, against XLA; lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.kernels import float8, norm, softmax, swiglu
from jaxpar.kernels.float8 import rounding
from jaxpar.kernels.float8.rounding import WithAmax
from jaxpar.kernels.hopper import quantize_transpose as hopper_quantize
from jaxpar.kernels.hopper import softmax as hopper_softmax
from jaxpar.kernels.hopper import swiglu as hopper_swiglu
from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.sharding.mesh import make_mesh
from tests.kernels.cases import interpreter
from tests.kernels.test_softmax import BLOCK, draw, of_any_size
from tests.kernels.test_swiglu import arguments
from tests.slow import slow, slow_but

f32, bf16 = jnp.float32, jnp.bfloat16


@pytest.fixture
def races():
    with interpreter() as races:
        yield races


def bits(a) -> np.ndarray:
    return np.asarray(a).view(np.uint8)


# ------------------------------------------------------------------------ rounding and transposing


@pytest.mark.parametrize(
    ("launch", "dtype", "normed"),
    slow_but(
        [
            (dict(), float8.FORWARD, False),
            (dict(columns=64), float8.BACKWARD, True),
            (dict(ctas=7), float8.BACKWARD, False),  # one without a tile
        ],
        [
            (launch, dtype, normed)
            for launch in (
                *(dict(), dict(columns=64), dict(rows=64)),
                *(dict(buffers=3, neighbors=1), dict(ctas=7)),
            )
            for dtype in (float8.FORWARD, float8.BACKWARD)
            for normed in (False, True)
        ],
    ),
    ids=str,
)
def test_rounds_and_transposes(launch, dtype, normed, races):
    x = jax.random.normal(jax.random.key(0), (256, 384), bf16)
    factors, wanted = (), x
    if normed:
        gain = 1 + 0.1 * jax.random.normal(jax.random.key(1), (384,))
        _, of_norm = norm.rms_norm_beside(x, gain, 1e-5)
        factors, wanted = (of_norm.scale.reshape(-1), gain), of_norm.unrounded()
    scale = float8.power_of_two_scale(float8.max_magnitude(wanted), dtype)
    launch = hopper_quantize.TileLaunch(**{"ctas": 2} | launch)
    q, transposed = hopper_quantize.quantize_both_ways(x, scale, dtype, factors, launch)
    wanted = bits(float8.quantize(wanted, scale, dtype))
    np.testing.assert_array_equal(bits(q), wanted)
    np.testing.assert_array_equal(bits(transposed), wanted.T)
    assert races() == [False]


# ------------------------------------------------------------------------------------------ softmax


@pytest.mark.parametrize(
    ("columns", "dtype"),
    slow_but(
        [(272, f32)],
        [(columns, dtype) for columns in (128, 256, 272, 1008) for dtype in (f32, bf16)],
    ),
)
def test_exponentials_and_sums(columns, dtype, races):
    """A block, blocks whose last begins in the one before, in the logits' place and elsewhere."""
    logits = draw(3, columns, dtype)
    largest, wanted = softmax.sum_by_xla(logits)
    first = logits[:, :BLOCK].astype(f32).max(axis=1)
    base, total = hopper_softmax.base_and_sum(logits, BLOCK, softmax.MAX_SUM)
    np.testing.assert_array_equal(base, first)
    np.testing.assert_allclose(total * jnp.exp(base - largest), wanted, rtol=3e-6)
    for out in {dtype, bf16}:
        found = hopper_softmax.exponentials(logits, out, BLOCK, softmax.LEAP)
        values, base, total = jax.block_until_ready(found)
        wanted_values, _, _ = softmax.exponentials_by_xla(logits, dtype=out)
        assert values.dtype == out
        np.testing.assert_array_equal(base, first)
        np.testing.assert_allclose(total * jnp.exp(base - largest), wanted, rtol=3e-6)
        found = np.asarray(values, np.float64) * np.exp(np.float64(base - largest))[:, None]
        tolerance = 2**-7 if out == bf16 else 1e-5
        np.testing.assert_allclose(found, np.asarray(wanted_values, np.float64), rtol=tolerance)
    assert not any(races())


def test_sums_of_logits_of_any_size(races):
    logits, rest = of_any_size()
    base, total = hopper_softmax.base_and_sum(jnp.asarray(logits), BLOCK, softmax.MAX_SUM)
    base, total = (np.asarray(a, np.float64) for a in (base, total))
    largest = logits.max(axis=1).astype(np.float64)
    wanted = np.log(np.exp(logits.astype(np.float64) - largest[:, None]).sum(axis=1))
    found = np.log(total[rest]) + (base - largest)[rest]
    np.testing.assert_allclose(found, wanted[rest], atol=2e-5)
    assert np.isnan(total[4]) and (total[rest] < softmax.MAX_SUM).all()
    assert base[5] == logits[5, :BLOCK].max()
    np.testing.assert_array_equal(base[[2, 3, 6]], largest[[2, 3, 6]])


@pytest.mark.parametrize(
    ("dtype", "out"), [(f32, f32), slow(bf16, bf16), slow(f32, bf16), slow(bf16, f32)]
)
def test_exponentials_are_written_again_where_a_row_leaps(dtype, out, races):
    logits, rest = of_any_size()
    logits = jnp.asarray(logits, dtype)
    found = hopper_softmax.exponentials(logits, out, BLOCK, softmax.LEAP)
    values, base, total = (np.asarray(a, np.float64)[rest] for a in found)
    exact = np.asarray(logits, np.float64)[rest]
    largest = exact.max(axis=1)
    assert (base <= largest).all() and (base >= largest - softmax.LEAP).all()
    assert np.isnan(found[2][4]) and np.isfinite(values).all()
    wanted = np.exp(exact - base[:, None])
    # What is written and then scaled is rounded twice, and 0 where it is lost beside the largest.
    tolerance = 2**-6 if out == bf16 else 3e-5
    np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=1e-30)
    np.testing.assert_allclose(total, wanted.sum(axis=1), rtol=3e-5)
    assert not any(races())


# ------------------------------------------------------------------------------------------- SwiGLU


def by_hopper(gate_up, scale, d_y, with_amax=False, columns=128):
    """Result and gradient, of rows, not under a jit."""
    gate_up, d_y = (a.reshape(-1, a.shape[-1]) for a in (gate_up, d_y))
    scale = None if scale is None else scale.reshape(-1)
    how = dict(with_amax=with_amax, columns=columns)
    result = hopper_swiglu.forward(swiglu._product, gate_up, scale, **how)
    return result, hopper_swiglu.backward(swiglu._gradients, gate_up, scale, d_y, **how)


@pytest.mark.parametrize(
    ("F", "scaled", "dtype"),
    [(256, True, bf16), slow(384, False, bf16), slow(256, True, f32), slow(384, False, f32)],
)
def test_swiglu(F, scaled, dtype, races):
    gate_up, scale, d_y = arguments(4, F, dtype, scaled)
    wanted = (
        swiglu.forward_by_xla(gate_up, scale),
        swiglu.backward_by_xla(gate_up, scale, d_y),
    )
    for (found,), like in zip(by_hopper(gate_up, scale, d_y), wanted, strict=True):
        assert found.dtype == like.dtype
        found, like = (np.asarray(a, np.float32) for a in (found, like.reshape(found.shape)))
        np.testing.assert_allclose(found, like, rtol=1e-5 if dtype == f32 else 2**-7, atol=1e-6)
    assert not any(races())


@pytest.mark.parametrize("bad", [slow(None), np.nan, slow(np.inf)])
def test_swiglu_measures_what_it_writes(bad, races):
    """NaN is the largest."""
    gate_up, _, d_y = arguments(2, 384, bf16, scaled=False)
    gate_up = gate_up if bad is None else gate_up.at[1, 0, 200].set(bad)
    for values, largest in by_hopper(gate_up, None, d_y, with_amax=True):
        values = np.abs(np.asarray(values, np.float32))
        np.testing.assert_array_equal(np.max(largest), np.max(values))
        assert largest.dtype == f32 and np.isfinite(np.max(largest)) == (bad is None)
    assert not any(races())


@pytest.mark.parametrize("half", ["gate", "up"])
def test_the_largest_gradient_may_be_in_either_half(half, races):
    gate, up = (1.0, 50.0) if half == "gate" else (9.0, 1.0)
    gate_up = jnp.concatenate([jnp.full((1, 128), gate), jnp.full((1, 128), up)], axis=-1)
    _, (gradient, largest) = by_hopper(gate_up, None, jnp.ones((1, 128)), with_amax=True)
    halves = [float(jnp.max(jnp.abs(a))) for a in jnp.split(gradient, 2, axis=-1)]
    assert (halves[0] > halves[1]) == (half == "gate")
    assert float(jnp.max(largest)) == max(halves)


@pytest.mark.slow
@pytest.mark.parametrize(("F", "ctas"), [slow(2048, 2), (1792, 7), slow(512, 1)])
def test_a_cta_takes_as_many_columns_as_divide_a_row(F, ctas, races):
    gate_up, _, d_y = arguments(2, F, f32, scaled=False)
    both = by_hopper(gate_up, None, d_y, with_amax=True, columns=hopper_swiglu.COLUMNS)
    wanted = swiglu.forward_by_xla(gate_up, None), swiglu.backward_by_xla(gate_up, None, d_y)
    for (found, largest), like in zip(both, wanted, strict=True):
        assert largest.shape == (2 * ctas,)
        np.testing.assert_allclose(found, like.reshape(found.shape), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------- lowered for CUDA


def shape(*dims: int, dtype=bf16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def lower(fn, *given):
    """The results' shapes, after lowering for CUDA."""
    traced = jax.jit(fn).trace(*given)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text(), "no kernel of ours"
    return traced.out_info


@pytest.mark.parametrize("dtype", [float8.FORWARD, float8.BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(32768, 2048), slow(16384, 14336), slow(16384, 4096)]
)
def test_quantize_lowers(rows, columns, dtype):
    x, scale = shape(rows, columns), shape(dtype=f32)
    quantize = lambda x, scale: rounding._by_kernel(x, scale, dtype)  # noqa: E731
    gain = shape(columns, dtype=f32)
    of_rows = shape(rows, 1, dtype=f32)
    for given in (x, norm.Unmaterialized(x, of_rows, gain, of_rows)):
        made = lower(quantize, given, scale)
        assert [(a.shape, a.dtype) for a in made] == [
            ((rows, columns), dtype),
            ((columns, rows), dtype),
        ]


@pytest.mark.parametrize("out", [f32, bf16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", slow_but([128_256], [128_256, 16_032, 151_936, 272]))
def test_softmax_lowers(columns, dtype, out):
    logits = shape(4096, columns, dtype=dtype)
    base, total = lower(softmax.sum_by_kernel, logits)
    assert base.shape == total.shape == (4096,)
    values, _, _ = lower(functools.partial(softmax.exponentials_by_kernel, dtype=out), logits)
    assert (values.shape, values.dtype) == (logits.shape, out)


@pytest.mark.parametrize("with_amax", [False, True])
@pytest.mark.parametrize(("rows", "F"), [(32768, 8192), slow(16384, 14336), slow(16384, 1792)])
def test_swiglu_lowers(rows, F, with_amax):
    gate_up, d_y, scale = shape(rows, 2 * F), shape(rows, F), shape(rows, 1, dtype=f32)
    how = dict(with_amax=with_amax)
    for of_rows in (scale, None):
        made = lower(functools.partial(swiglu.forward_by_kernel, **how), gate_up, of_rows)
        back = lower(functools.partial(swiglu.backward_by_kernel, **how), gate_up, of_rows, d_y)
        assert (made.shape, back.shape) == (d_y.shape, gate_up.shape)


def every_kernel(x, gate_up, logits, scale):
    """Results and gradients of the public functions."""
    hidden, vjp = jax.vjp(lambda a: swiglu.swiglu(a, None), gate_up)
    measured, vjp_measured = jax.vjp(swiglu.swiglu, WithAmax(gate_up, scale), None)
    return (
        rounding.quantize_both_ways(x, scale, float8.FORWARD),
        softmax.base_and_sum(logits),
        softmax.exponentials(logits, dtype=logits.dtype),
        (hidden, vjp(hidden)),
        (measured, vjp_measured(measured)[0]),
    )


#: Kernels of `every_kernel`.
KERNELS = 7


@pytest.mark.parametrize("columns", [1024, 1000])
@pytest.mark.parametrize(("capability", "runs"), [("9.0", True), ("10.0", True), ("8.9", False)])
def test_where_the_kernels_run(capability, runs, columns):
    """1000 is a multiple of 8, and the softmax needs one of 16."""
    given = shape(256, columns), shape(256, 2 * columns), shape(256, columns), shape(dtype=f32)
    with compiling_for(Platform("gpu", "a GPU", capability)):
        text = str(jax.make_jaxpr(lambda *a: every_kernel(*a))(*given))
    assert text.count("mpmd_map[") == KERNELS * (runs and columns % 128 == 0)


def test_results_vary_over_the_mesh_as_their_operands_do(devices):
    mesh, split = make_mesh(ParallelConfig(data=2), devices[:2]), PartitionSpec("data")
    given = shape(512, 1024), shape(512, 2048), shape(512, 1024)

    def local(x, *rest):
        made = every_kernel(x, *rest, jnp.max(x).astype(f32))
        kinds = {jax.typeof(a).manual_axis_type for a in jax.tree.leaves(made)}
        assert kinds == {jax.typeof(x).manual_axis_type}
        return jax.tree.map(lambda a: a.reshape(-1)[:8].astype(f32), made)

    with compiling_for(Platform("gpu", "NVIDIA H200", "9.0")):
        of_each = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
        lower(of_each, *given)


def test_exponentials_take_the_place_of_logits(devices):
    """Also under `shard_map`, where JAX's public entry overwrites nothing."""
    mesh, split = make_mesh(ParallelConfig(data=2), devices[:2]), PartitionSpec("data")
    run = functools.partial(softmax.exponentials_by_kernel, dtype=bf16)
    of_each = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split)
    for fn in (run, of_each):
        traced = jax.jit(fn).trace(shape(512, 1024))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "output_operand_alias<output_tuple_indices = [0], operand_index = 0" in text
