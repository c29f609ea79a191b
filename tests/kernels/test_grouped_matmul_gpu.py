"""The kernels of experts on a Hopper GPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.float8 import BACKWARD, FORWARD
from jaxpar.kernels.grouped_matmul import hopper, max_rows, reference, refusal, tiles_of

pytestmark = pytest.mark.gpu

D, F, COUNTS = 2048, 768, [0, 1, 127, 128, 129, 1500]


@pytest.fixture
def tiles():
    if why := refusal(D, F, "bfloat16"):
        pytest.skip(why)
    return jax.jit(tiles_of, static_argnums=(1, 2))(
        jnp.array(COUNTS), max_rows(sum(COUNTS), len(COUNTS), 128) + 128, 128
    )


def draw(seed: int, *shape: int, dtype="bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def in_use(tiles, a) -> np.ndarray:
    return np.asarray(a[: int(tiles.used[0]) * 128], np.float64)


def error(tiles, found, wanted) -> float:
    found, wanted = in_use(tiles, found), in_use(tiles, wanted)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


#: A width that tiles divide, and two that end within a tile, of 192 and of 256.
WIDTHS = [768, 1856, 704]


@pytest.mark.parametrize("F", WIDTHS)
@pytest.mark.parametrize("expert_dim", [0, 1])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_grouped_matmul(narrow, transpose, expert_dim, F, tiles):
    """Rows [R, K] times [K, N], to a result's bfloat16. What is beyond N stays as it was."""
    K, N = (D, F) if narrow else (F, D)
    R, E = 128 * len(tiles.expert), len(COUNTS)
    cut = (N, K) if transpose else (K, N)
    w = draw(1, *((E, *cut) if expert_dim == 0 else (cut[0], E, cut[1])))
    how = dict(transpose=transpose, expert_dim=expert_dim)
    x = draw(0, R, K)
    found = jax.jit(functools.partial(hopper.grouped_matmul, **how))((x,), (w,), tiles)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(reference.grouped_matmul, **how))((x,), (w,), tiles)
    assert found.shape == (R, N) and error(tiles, found, wanted) < 5e-3


@pytest.mark.parametrize("F", WIDTHS)
@pytest.mark.parametrize("expert_dim", [0, 1])
@pytest.mark.parametrize("narrow", [False, True])
def test_grouped_outer(narrow, expert_dim, F, tiles):
    M, N = (D, F) if narrow else (F, D)
    R = 128 * len(tiles.expert)
    used = jnp.arange(R) < 128 * tiles.used[0]
    x, y = (draw(i, R, n) * used[:, None].astype(jnp.bfloat16) for i, n in enumerate((M, N)))
    how = dict(expert_dim=expert_dim, dtype=jnp.float32)
    found = jax.jit(functools.partial(hopper.grouped_outer, **how))(x, y, tiles)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(reference.grouped_outer, **how))(x, y, tiles)
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-4


@pytest.mark.parametrize(("expert_dim", "rows"), [(0, FORWARD), (1, FORWARD), (0, BACKWARD)])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("K", "N"), [(D, F), (F, D)])
def test_scaled_matmul(expert_dim, rows, terms, K, N, tiles):
    """To a result's bfloat16 (1.7e-3), and to Hopper's short sums."""
    R, E = 128 * len(tiles.expert), len(COUNTS)
    shape = (E, N, K) if expert_dim == 0 else (N, E, K)
    xs = [draw(i, R, K, dtype=rows) for i in range(terms)]
    ws = [draw(2 + i, *shape, dtype=FORWARD) for i in range(terms)]
    scale = jnp.exp2(jnp.round(4 * draw(5, R, dtype="float32")))
    how = dict(expert_dim=expert_dim, dtype=jnp.bfloat16)
    found = jax.jit(functools.partial(hopper.scaled_matmul, **how))(xs, ws, scale, tiles)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(reference.scaled_matmul, **how))(xs, ws, scale, tiles)
    of_rows = scale[:, None].astype(found.dtype)
    assert error(tiles, found / of_rows, wanted / of_rows) < 1e-2


@pytest.mark.parametrize("width", [D, F, 128, 4096])
def test_rows_are_rounded_as_the_reference_does(width, tiles):
    R = 128 * len(tiles.expert)
    size = jnp.exp2(20 * jnp.tanh(draw(1, 512, 1, dtype="float32")))
    x = (draw(0, 512, width, dtype="float32") * size).astype("bfloat16").at[3].set(0)
    token = jax.random.randint(jax.random.key(2), (R,), 0, 512, jnp.int32)
    rows, x = x[token], tuple(jnp.split(x, 4))
    for dtype in (FORWARD, BACKWARD):
        take = functools.partial(hopper.rows_taken_in_float8, dtype=dtype, keep=True)
        found, wanted = jax.jit(take)(x, token, tiles), (*reference.rounded(dtype, rows), rows)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(in_use(tiles, a), in_use(tiles, b))


@pytest.mark.parametrize("width", [F, 640, 128, 4096])
def test_swiglu(width, tiles):
    """Rounded once, from numbers whose last digits may differ."""
    R = 128 * len(tiles.expert)
    gate, up, d = (draw(i, R, width) for i in range(3))
    scale = draw(4, R, dtype="float32")
    forward, backward = (gate, up, scale, tiles, FORWARD), (gate, up, d, scale, tiles, BACKWARD)
    for name, (*operands, dtype) in (("swiglu", forward), ("swiglu_backward", backward)):
        kernel, plain = (getattr(by, f"{name}_in_float8") for by in (hopper, reference))
        found = jax.jit(functools.partial(kernel, dtype=dtype))(*operands)
        wanted = plain(*operands, dtype)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype and error(tiles, a, b) < 2e-2


def test_what_is_not_finite_shows(tiles):
    R = 128 * len(tiles.expert)
    x, token = draw(0, 16, D).at[3, 7].set(np.nan), jnp.arange(R, dtype=jnp.int32) % 16
    q, top = hopper.rows_taken_in_float8((x,), token, tiles, FORWARD, keep=False)
    bad = np.asarray(token == 3)[: len(in_use(tiles, q))]
    np.testing.assert_array_equal(np.isnan(in_use(tiles, top)), bad)
    np.testing.assert_array_equal(np.isnan(in_use(tiles, q)).all(axis=1), bad)
