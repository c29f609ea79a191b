"""The products of experts: tiles, and the reference against NumPy, one expert at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.float8 import FORWARD, max_magnitude, power_of_two_scale, quantize
from jaxpar.kernels.float8.reference import E4M3, E5M2, round_to_float8
from jaxpar.kernels.glu import ClampedSwiGLU, GeGLU, SwiGLU
from jaxpar.kernels.grouped_matmul import (
    bias_gradient,
    glu_backward,
    grouped_matmul,
    grouped_outer,
    max_rows,
    refusal,
    rows_added,
    tile_rows,
    tiles_of,
)
from jaxpar.kernels.grouped_matmul.capability import refusal_in_float8, refusal_of_rows
from jaxpar.kernels.platform import Platform

TILE = 4
HOPPER = Platform("gpu", "NVIDIA H100", "9.0")

#: Rows of each expert: some empty, one with everything, and one tile more or less.
COUNTS = [[3, 0, 8, 1], [0, 0, 0, 11], [11, 0, 0, 0], [0, 0, 0, 0], [1, 3, 4, 5], [4, 4, 4, 4]]


def rows_of(counts):
    """The slices of a buffer that hold each expert's rows."""
    starts = np.concatenate([[0], np.cumsum([-(-n // TILE) * TILE for n in counts])])
    return starts, [slice(s, s + n) for s, n in zip(starts, counts, strict=False)]


@pytest.fixture
def draw():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tiles(counts):
    rows = max_rows(sum(counts), len(counts), TILE) + TILE
    tiles, (starts, _) = tiles_of(jnp.array(counts), rows, TILE), rows_of(counts)
    np.testing.assert_array_equal(tiles.starts, starts)
    assert starts[-1] <= rows and int(tiles.used[0]) * TILE == starts[-1]
    owners = [e for e, n in enumerate(counts) for _ in range(-(-n // TILE))]
    np.testing.assert_array_equal(tiles.expert[: len(owners)], owners)
    assert set(np.asarray(tiles.expert)) <= set(range(len(counts)))


def test_the_buffer_is_just_large_enough():
    assert max_rows(1024, 8, 128) == 1024 + 8 * 128 - 128
    assert max_rows(2, 128, 128) == 2 * 128, "two rows are in at most two experts"


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("expert_dim", [0, 1])
def test_product_of_every_expert(counts, transpose, expert_dim, draw):
    E, K, N = len(counts), 6, 5
    rows = max_rows(sum(counts), E, TILE) + TILE
    tiles, (_, slices) = tiles_of(jnp.array(counts), rows, TILE), rows_of(counts)
    x, w = (draw(rows, K), draw(rows, K)), (draw(E, K, N), draw(E, K, N))
    stored = [np.swapaxes(a, 1, 2) if transpose else a for a in w]
    stored = [np.moveaxis(a, 0, expert_dim) for a in stored]
    how = dict(transpose=transpose, expert_dim=expert_dim)
    one = grouped_matmul(jnp.array(x[0]), jnp.array(stored[0]), tiles, **how)
    both = grouped_matmul(tuple(map(jnp.array, x)), tuple(map(jnp.array, stored)), tiles, **how)
    for e, s in enumerate(slices):
        terms = [a[s] @ b[e] for a, b in zip(x, w, strict=True)]
        np.testing.assert_allclose(one[s], terms[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(both[s], terms[0] + terms[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("expert_dim", [0, 1])
def test_outer_product_of_every_expert(counts, expert_dim, draw):
    rows = max_rows(sum(counts), len(counts), TILE) + TILE
    tiles, (_, slices) = tiles_of(jnp.array(counts), rows, TILE), rows_of(counts)
    x, y = draw(rows, 6), draw(rows, 5)
    there = np.zeros((rows, 1), bool)
    for s in slices:
        there[s] = True
    poisoned = np.where(there, x, 1e30)  # padding is multiplied by 0
    out = grouped_outer(
        jnp.array(poisoned), jnp.array(np.where(there, y, 0)), tiles, expert_dim=expert_dim
    )
    wanted = np.moveaxis(np.stack([x[s].T @ y[s] for s in slices]), 0, expert_dim)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_a_token_are_added(draw):
    y, rows = draw(7, 3), np.array([[0, 6], [-1, 2], [5, -1], [-1, -1], [3, 3]])
    wanted = [sum((y[r] for r in token if r >= 0), np.zeros(3)) for token in rows]
    np.testing.assert_allclose(rows_added(jnp.array(y), jnp.array(rows)), wanted, rtol=1e-6)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_bias_gradients_are_sums_over_the_rows_in_use(counts, draw):
    rows = max_rows(sum(counts), len(counts), TILE) + TILE
    tiles, (_, slices) = tiles_of(jnp.array(counts), rows, TILE), rows_of(counts)
    d = draw(rows, 3)
    there = np.zeros((rows, 1), bool)
    for s in slices:
        there[s] = True
    d = np.where(there, d, 0)
    d[int(tiles.used[0]) * TILE :] = np.nan  # not defined
    wanted = np.stack([d[s].sum(0) for s in slices])
    np.testing.assert_allclose(bias_gradient(jnp.array(d), tiles), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "glu", [SwiGLU(), GeGLU(), ClampedSwiGLU(0.7, 1.702)], ids=lambda glu: type(glu).__name__
)
def test_glu_backward_is_the_gradient(glu, draw):
    gate, up, d, scale = draw(8, 6), draw(8, 6), draw(8, 6), draw(8)
    biases = draw(2, 6), draw(2, 6)
    tiles = tiles_of(jnp.array([4, 4]), 8, TILE)

    def hidden(gate, up, scale):
        gate, up = (a + np.repeat(b, 4, axis=0) for a, b in zip((gate, up), biases, strict=True))
        return glu.hidden(gate, up) * scale[:, None]

    out, pullback = jax.vjp(hidden, gate, up, scale)
    given = map(jnp.array, (gate, up, d, scale))
    found = glu_backward(glu, *given, tiles, tuple(map(jnp.array, biases)))
    for a, b in zip(found, (out, *pullback(jnp.array(d))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("D", "F", "dtype", "platform", "why"),
    [
        (2048, 768, "bfloat16", HOPPER, None),
        (2048, 384, "float16", HOPPER, None),
        (2880, 2880, "bfloat16", HOPPER, None),
        (2688, 1856, "bfloat16", HOPPER, None),
        (2048, 720, "bfloat16", HOPPER, "multiples of 64 from 128 on, and are 2048 and 720"),
        (64, 768, "bfloat16", HOPPER, "multiples of 64 from 128 on"),
        (2048, 768, "float32", HOPPER, "bfloat16 or float16, not float32"),
        (2048, 768, "bfloat16", Platform("cpu"), "Hopper.*not platform cpu"),
        (2048, 768, "bfloat16", Platform("gpu", "NVIDIA B200", "10.0"), "Hopper.*not 10.0"),
    ],
)
def test_what_the_kernels_refuse(D, F, dtype, platform, why):
    found = refusal(D, F, dtype, platform)
    assert (found is None) == (why is None) and tile_rows(D, F, dtype, platform) == (
        32 if why else 128
    )
    if why:
        assert re.search(why, found)


@pytest.mark.parametrize(
    ("width", "why"),
    [(768, None), (384, "no rows of 384"), (700, "128"), (2880, "multiples of 128 in float8")],
)
def test_rows_that_the_kernels_refuse_to_round(width, why):
    found = refusal_of_rows(width, "bfloat16", HOPPER)
    assert (found is None) == (why is None) and (why is None or why in found)


def test_products_in_float8_need_whole_steps():
    """In 16 bits, a step has 64 numbers, and 2880 of them are 45 steps."""
    assert refusal(2880, 2880, "bfloat16", HOPPER) is None
    assert refusal_in_float8(2048, 2880, "bfloat16", HOPPER) is None
    assert "not 2880" in refusal_in_float8(2880, 2048, "bfloat16", HOPPER)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("expert_dim", [0, 1])
def test_product_of_every_expert_in_float8(counts, expert_dim, draw):
    """Rows rounded with a scale each, and matrices with one, as written out for plain float32."""
    E, K, N = len(counts), 6, 5
    rows = max_rows(sum(counts), E, TILE) + TILE
    tiles, (_, slices) = tiles_of(jnp.array(counts), rows, TILE), rows_of(counts)
    apart = np.exp(3 * draw(rows, 1))
    x, w = draw(rows, K) * apart, draw(E, N, K)
    x_, w_ = round_to_float8(jnp.array(x), E4M3, 0), round_to_float8(jnp.array(w), E4M3)
    scale = power_of_two_scale(max_magnitude(w), FORWARD)
    w8 = jnp.moveaxis(quantize(jnp.array(w), scale, FORWARD), 0, expert_dim)
    x8 = kernels.rounded((jnp.array(x),), FORWARD)
    how = dict(expert_dim=expert_dim, dtype=jnp.float32)
    found = kernels.scaled_matmul(x8, (w8,), scale, tiles, **how)
    for e, s in enumerate(slices):
        np.testing.assert_allclose(found[s] / apart[s], x_[s] @ w_[e].T / apart[s], rtol=1e-5)


def test_gradients_in_float8_have_a_common_scale(draw):
    gate, up, d, scale = map(jnp.array, (draw(8, 6), 100 * draw(8, 6), draw(8, 6), draw(8)))
    tiles = tiles_of(jnp.array([8]), 8, TILE)
    made, rows = kernels.swiglu_backward_in_float8(gate, up, d, scale, tiles)
    for a, b in zip(made, glu_backward(SwiGLU(), gate, up, d, scale, tiles), strict=True):
        np.testing.assert_array_equal(a, b)
    wanted = round_to_float8(jnp.concatenate([made[1], made[2]], axis=1), E5M2, 0)
    found = jnp.concatenate(rows.values, axis=1).astype(jnp.float32) * rows.inverse[:, None]
    np.testing.assert_array_equal(found, wanted)
    hidden = kernels.swiglu_in_float8(gate, up, scale, tiles)
    found = hidden.values[0].astype(jnp.float32) * hidden.inverse[:, None]
    np.testing.assert_array_equal(found, round_to_float8(made[0], E4M3, 0))
