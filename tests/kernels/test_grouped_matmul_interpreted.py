"""The Hopper kernels of experts on a CPU, in Pallas' interpreter: numbers, races, every barrier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.glu import ClampedSwiGLU, SwiGLU
from jaxpar.kernels.grouped_matmul import hopper, max_rows, reference, tiles_of
from jaxpar.kernels.grouped_matmul.hopper.pipeline import Launch, place
from tests.kernels.cases import interpreter
from tests.slow import slow, slow_but

CLAMPED = ClampedSwiGLU(limit=1.0, alpha=1.702)
LAUNCH = Launch(ctas=2, interpret=True)
TILE = 128

#: Rows of each expert: around a tile, empty experts, one with everything, none at all.
QUICK = [0, 1, 127, 128, 129]
#: Rows of passes that the interpreter runs one at a time.
FEW = [0, 1, 127]
ALL = [QUICK, [300, 0, 0], [0, 0, 300], [0, 0], [128, 256, 1, 0, 7, 640]]
COUNTS = slow_but([QUICK], ALL)


@pytest.fixture
def races():
    with interpreter() as races:
        yield races


def inputs(counts, *widths, dtype="bfloat16"):
    """The tiles of a buffer with one tile that is not in use, the rows in use, and arrays."""
    rows = max_rows(sum(counts), len(counts), TILE) + TILE
    tiles, rng = tiles_of(jnp.array(counts), rows, TILE), np.random.default_rng(1)
    arrays = [jnp.asarray(rng.normal(size=(rows, width)), dtype) for width in widths]
    return tiles, slice(0, int(tiles.used[0]) * TILE), *arrays


def close(found, wanted, atol):
    found, wanted = (np.asarray(a, np.float32) for a in (found, wanted))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=atol)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("transpose", "expert_dim", "terms", "N"),
    [slow(False, 0, 1, 256), (True, 1, 2, 128), slow(True, 0, 1, 384), slow(False, 1, 2, 128)],
)
def test_matmul(counts, transpose, expert_dim, terms, N, races):
    K, E = 128, len(counts)
    tiles, used, *xs = inputs(counts, *[K] * terms)
    shape = [N, K] if transpose else [K, N]
    shape.insert(expert_dim, E)
    rng = np.random.default_rng(2)
    ws = [jnp.asarray(rng.normal(size=shape), "bfloat16") for _ in range(terms)]
    how = dict(transpose=transpose, expert_dim=expert_dim)
    found = hopper.matmul.grouped_matmul(xs, ws, tiles, **how, launch=LAUNCH)
    close(found[used], reference.grouped_matmul(xs, ws, tiles, **how)[used], 0.1)
    assert races() == [False]


@pytest.mark.slow
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("rows", "expert_dim", "terms", "N"),
    [
        ("float8_e4m3fn", 1, 1, 256),
        ("float8_e5m2", 0, 2, 128),
        ("float8_e4m3fn", 0, 1, 384),
    ],
)
def test_scaled_matmul(counts, rows, expert_dim, terms, N, races):
    K, E, rng = 256, len(counts), np.random.default_rng(2)
    tiles, used, *xs = inputs(counts, *[K] * terms, dtype=rows)
    shape = (E, N, K) if expert_dim == 0 else (N, E, K)
    ws = [jnp.asarray(rng.normal(size=shape), "float8_e4m3fn") for _ in range(terms)]
    scale = jnp.asarray(2.0 ** rng.integers(-9, 9, size=len(xs[0])), jnp.float32)
    how = dict(expert_dim=expert_dim, dtype=jnp.bfloat16)
    found = hopper.matmul.scaled_matmul(xs, ws, scale, tiles, **how, launch=LAUNCH)[used]
    wanted = reference.scaled_matmul(xs, ws, scale, tiles, **how)[used]
    of_rows = np.asarray(scale)[used, None]
    close(found / of_rows, wanted / of_rows, 0.1)
    assert races() == [False]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("expert_dim", "dtype"), [(0, "float32"), slow(1, "bfloat16")])
def test_outer(counts, expert_dim, dtype, races):
    tiles, _, x, y = inputs(counts, 256, 128)
    how = dict(expert_dim=expert_dim, dtype=jnp.dtype(dtype))
    found = hopper.outer.grouped_outer(x, y, tiles, **how, launch=LAUNCH)
    close(found, reference.grouped_outer(x, y, tiles, **how), 1e-3 if dtype == "float32" else 0.1)
    assert races() == [False]


@pytest.mark.parametrize(("counts", "parts"), [(FEW, 4), slow(FEW, 1), slow(QUICK, 2)], ids=str)
def test_rows_taken(counts, parts, races):
    tiles, used, x = inputs(counts, 128)
    token = jnp.asarray(np.random.default_rng(4).integers(0, len(x), size=len(x)), jnp.int32)
    found = hopper.rows.rows_taken(tuple(jnp.split(x, parts)), token, tiles, ctas=2)
    np.testing.assert_array_equal(found[used], x[token][used])
    assert races() == [False]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [FEW], ids=str)
@pytest.mark.parametrize(
    ("dtype", "keep", "parts"), [("float8_e4m3fn", False, 1), ("float8_e5m2", True, 2)]
)
def test_rows_taken_in_float8(counts, dtype, keep, parts, races):
    tiles, used, x = inputs(counts, 256)
    x = x * jnp.exp2(jnp.arange(len(x)) % 40 - 20)[:, None].astype(x.dtype)
    x = x.at[3].set(0)
    token = jnp.asarray(np.random.default_rng(4).integers(0, len(x), size=len(x)), jnp.int32)
    dtype, rows, x = jnp.dtype(dtype), x[token], tuple(jnp.split(x, parts))
    found = hopper.rows_taken_in_float8(x, token, tiles, dtype, keep=keep, ctas=2)
    wanted = *reference.rounded(dtype, rows), *[rows] * keep
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(*(np.asarray(c[used], np.float32) for c in (a, b)))
    assert races() == [False]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [FEW], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_swiglu_in_float8(counts, backward, races):
    """The last digit of a number before rounding may differ, and so its rounding."""
    tiles, used, gate, up, d = inputs(counts, 256, 256, 256)
    scale = jnp.asarray(np.random.default_rng(3).normal(size=len(gate)), jnp.float32)
    operands = (gate, up, d, scale) if backward else (gate, up, scale)
    name, dtype = ("backward_", jnp.float8_e5m2) if backward else ("", jnp.float8_e4m3fn)
    kernel, plain = (getattr(by, f"swiglu_{name}in_float8") for by in (hopper, reference))
    found, wanted = kernel(*operands, tiles, dtype, ctas=2), plain(*operands, tiles, dtype)
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(c[used], np.float32) for c in (a, b))
        if found[0].dtype == dtype or a.ndim == 1:
            np.testing.assert_allclose(a, b, rtol=0.25, atol=1e-2)
            assert (a != b).mean() < 0.01 or a.ndim == 1
        else:
            close(a, b, 2e-3)
    assert races() == [False]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [FEW, *map(slow, ALL)], ids=str)
@pytest.mark.parametrize(
    ("glu", "biased"),
    [(SwiGLU(), False), (CLAMPED, True), (SwiGLU(), True), (CLAMPED, False)],
    ids=["swiglu", "clamped-biased", "swiglu-biased", "clamped"],
)
def test_glu_backward(counts, glu, biased, races):
    tiles, used, gate, up, d = inputs(counts, 128, 128, 128)
    rng, shape = np.random.default_rng(5), (len(counts), 128)
    biases = [jnp.asarray(rng.normal(size=shape), jnp.float32) if biased else None for _ in "gu"]
    scale = jnp.asarray(np.random.default_rng(3).normal(size=len(gate)), jnp.float32)
    given = glu, gate, up, d, scale, tiles, biases
    found = hopper.glu_backward(*given, launch=LAUNCH)
    for a, b in zip(found, reference.glu_backward(*given), strict=True):
        close(a[used], b[used], 2e-3)
    given = glu, gate, up, scale, tiles, biases
    found = hopper.glu_hidden(*given, ctas=2)[used]
    close(found, reference.glu_hidden(*given).astype(found.dtype)[used], 2e-3)
    assert races() == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_rows_added(k, races):
    rng = np.random.default_rng(4)
    y = jnp.asarray(rng.normal(size=(50, 128)), "bfloat16")
    rows = jnp.asarray(rng.integers(-1, 50, (37, k)), jnp.int32)
    found = hopper.rows_added(y, rows, ctas=2)
    close(found, reference.rows_added(y, rows), 1e-6)
    assert races() == [False]


@pytest.mark.parametrize(("row_tiles", "column_tiles"), [(1, 1), (3, 2), (4, 6), (9, 5), (0, 3)])
def test_every_tile_of_the_result_once(row_tiles, column_tiles):
    total = row_tiles * column_tiles
    where = jax.vmap(lambda i: place(i, jnp.int32(row_tiles), column_tiles))
    found = where(jnp.arange(total, dtype=jnp.int32)) if total else ((), ())
    places = set(zip(map(int, found[0]), map(int, found[1]), strict=True))
    assert places == {(m, n) for m in range(row_tiles) for n in range(column_tiles)}
