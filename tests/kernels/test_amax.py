"""Largest magnitudes that come with an array, or by a norm's rows, and float8 products of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import float8
from jaxpar.kernels.float8.rounding import WithAmax
from tests.kernels.test_float8 import FORMATS, example, normal, relative_error, unwritten
from tests.slow import slow


@pytest.mark.parametrize("std", [1e-6, slow(1.0), slow(1e4)])
def test_a_norms_largest_is_found_by_its_rows(std):
    """But for its last digits: what is scaled by it stays in the range of the dtype."""
    x, gain = normal(256, 384, std=std), 1 + 0.1 * normal(384, seed=1)
    _, normed = unwritten(x, gain, jnp.float32)
    found, wanted = normed.max_magnitude(), float8.max_magnitude(normed.unrounded())
    np.testing.assert_allclose(found, wanted, rtol=2**-21)
    for dtype, _, _ in FORMATS.values():
        room = float(jnp.finfo(dtype).max) / wanted  # brings the largest to the edge of the range
        for nudge in (1 - 2**-21, 1.0, 1 + 2**-21):
            edge = normed.unrounded() * (room * nudge)
            assert np.isfinite(np.asarray(edge.astype(dtype), np.float32)).all()


def test_the_amax_of_a_norm_of_nan_is_nan():
    _, normed = unwritten(normal(8, 16).at[3, 4].set(jnp.nan), jnp.ones(16))
    assert np.isnan(normed.max_magnitude())


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_with_amax_are_the_same(scaling):
    """Bit for bit, whether x or the outputs' gradients come with their largest, or not."""
    x, ws, dys = example(rows_apart=2.0)

    def multiply(x, ws, with_amax):
        scales = [float8.power_of_two_scale(float8.max_magnitude(w), float8.FORWARD) for w in ws]
        pairs = zip(ws, scales, strict=True)
        weights = [float8.quantize_weight(w, scale, scaling) for w, scale in pairs]
        return float8.matmul(x, weights, "x", with_amax=with_amax)

    @jax.jit
    def plain(x, ws, dys):
        ys, vjp = jax.vjp(functools.partial(multiply, with_amax=False), x, ws)
        return ys, *vjp(dys)

    @jax.jit
    def with_largest(x, ws, dys):
        given = WithAmax(x, float8.max_magnitude(x))
        ys, vjp = jax.vjp(functools.partial(multiply, with_amax=True), given, ws)
        dx, dws = vjp([WithAmax(dy, float8.max_magnitude(dy)) for dy in dys])
        return [y.values for y in ys], dx.values, dws

    found, wanted = with_largest(x, ws, dys), plain(x, ws, dys)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_scale_is_of_the_largest_that_is_given():
    """Nobody looks for it: with 16 times of it, numbers are rounded 16 times as low."""
    x, ws, dys = example()
    loud = WithAmax(x.at[0, 0].set(2.0**-9 * float8.max_magnitude(x)), 16 * float8.max_magnitude(x))
    scale = float8.power_of_two_scale(float8.max_magnitude(ws[0]), float8.FORWARD)

    def multiply(given):
        return float8.matmul(given, [float8.quantize_weight(ws[0], scale, "tensor")], "x")[0]

    assert "reduce_max" not in str(jax.make_jaxpr(multiply)(loud))
    assert "reduce_max" in str(jax.make_jaxpr(multiply)(loud.values))
    alike = multiply(WithAmax(loud.values, float8.max_magnitude(loud.values)))
    assert 0 < relative_error(multiply(loud), alike) < 1e-2  # what lies below the normal numbers
