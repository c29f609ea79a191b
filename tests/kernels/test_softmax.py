"""The kernels over logits, interpreted, against XLA's and against NumPy.

The interpreter gives a kernel's result an array of its own; in the logits' place it is written on
a GPU alone (`test_softmax_gpu.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import softmax
from jaxpar.kernels.platform import Platform, compiling_for
from tests.slow import slow

LOGITS = [jnp.float32, jnp.bfloat16]

BLOCK = 256


def draw(rows: int, columns: int, dtype) -> jax.Array:
    return (3 * jax.random.normal(jax.random.key(0), (rows, columns))).astype(dtype)


def of_any_size() -> tuple[np.ndarray, list[int]]:
    """Logits far apart, one of them NaN, in rows of some blocks; and the other rows."""
    logits = np.random.default_rng(0).normal(size=(10, 1008)).astype(np.float32) * 40
    logits[1], logits[2, 7], logits[3, :1000], logits[4, 5] = -1e30, 3e38, -np.inf, np.nan
    logits[5, 900], logits[6, 900] = logits[5, :BLOCK].max() + 60, logits[6, :BLOCK].max() + 100
    logits[7, [300, 600, 900]] = logits[7, :BLOCK].max() + np.array([30, 60, 90])
    logits[8, BLOCK:] = logits[8, :BLOCK].max() - 1
    logits[8, 900], logits[9, 1007] = logits[8, :BLOCK].max() + 19, logits[9].max() + 25
    return logits, [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        slow(256, jnp.float32, id="a block-float32"),
        slow(256, jnp.bfloat16, id="a block-bfloat16"),
        pytest.param(272, jnp.float32, id="and a vector-float32"),
        slow(272, jnp.bfloat16, id="and a vector-bfloat16"),
        slow(1008, jnp.float32, id="the last cut-float32"),
        pytest.param(1008, jnp.bfloat16, id="the last cut-bfloat16"),
    ],
)
def test_the_kernels_compute_the_same(columns, dtype):
    logits, run = draw(9, columns, dtype), dict(block=BLOCK, interpret=True)
    base, total = softmax.sum_by_triton(logits, **run)
    largest, wanted = softmax.sum_by_xla(logits)
    assert base.dtype == total.dtype == jnp.float32
    first = logits[:, :BLOCK].astype(jnp.float32).max(axis=1)
    np.testing.assert_array_equal(base, first)
    np.testing.assert_allclose(total * jnp.exp(base - largest), wanted, rtol=3e-6)
    for out in {dtype, jnp.bfloat16}:
        values, base, total = softmax.exponentials_by_triton(logits, dtype=out, **run)
        wanted_values, largest, wanted = softmax.exponentials_by_xla(logits, dtype=out)
        assert values.dtype == wanted_values.dtype == out and values.shape == wanted_values.shape
        np.testing.assert_array_equal(base, first)
        np.testing.assert_allclose(total * jnp.exp(base - largest), wanted, rtol=3e-6)
        found = np.asarray(values, np.float64) * np.exp(np.float64(base - largest))[:, None]
        tolerance = 2**-7 if out == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(found, np.asarray(wanted_values, np.float64), rtol=tolerance)


def test_the_kernel_takes_logits_of_any_size():
    logits, rest = of_any_size()
    found = softmax.sum_by_triton(jnp.asarray(logits), block=BLOCK, interpret=True)
    base, total = (np.asarray(a, np.float64) for a in found)
    largest = logits.max(axis=1).astype(np.float64)
    wanted = np.log(np.exp(logits.astype(np.float64) - largest[:, None]).sum(axis=1))
    np.testing.assert_allclose(
        np.log(total[rest]) + (base - largest)[rest], wanted[rest], atol=2e-5
    )
    assert np.isnan(total[4]) and (total[rest] < softmax.MAX_SUM).all()
    # What fits goes by the first block; where it does not, the base is the largest.
    assert base[5] == logits[5, :BLOCK].max()
    np.testing.assert_array_equal(base[[2, 3, 6]], largest[[2, 3, 6]])


@pytest.mark.parametrize("dtype", LOGITS, ids=["float32", "bfloat16"])
def test_exponentials_are_written_again_where_a_row_leaps(dtype):
    logits, rest = of_any_size()
    logits = jnp.asarray(logits, dtype)
    run = dict(dtype=dtype, block=BLOCK, interpret=True)
    found = softmax.exponentials_by_triton(logits, **run)
    values, base, total = (np.asarray(a, np.float64)[rest] for a in found)
    exact = np.asarray(logits, np.float64)[rest]
    largest = exact.max(axis=1)
    assert (base <= largest).all() and (base >= largest - softmax.LEAP).all()
    assert np.isnan(found[2][4]) and np.isfinite(values).all()
    wanted = np.exp(exact - base[:, None])
    # What is written and then scaled is rounded twice, and 0 where it is lost beside the largest.
    tolerance = 2**-6 if dtype == jnp.bfloat16 else 3e-5
    np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=1e-30)
    np.testing.assert_allclose(total, wanted.sum(axis=1), rtol=3e-5)


@pytest.mark.parametrize(
    ("columns", "dtype", "by"),
    [
        (1008, jnp.float32, "kernel"),
        (1008, jnp.bfloat16, "kernel"),
        (1008, jnp.float16, "XLA"),
        (1001, jnp.bfloat16, "XLA"),
    ],
    ids=["float32", "bfloat16", "float16", "length"],
)
def test_the_kernels_are_for_gpus_and_some_shapes(columns, dtype, by):
    logits = jax.ShapeDtypeStruct((8, columns), dtype)

    def kernels() -> int:
        def both(logits):  # traced anew each time, so a function of its own
            return softmax.base_and_sum(logits), softmax.exponentials(logits, dtype=jnp.bfloat16)

        return str(jax.make_jaxpr(both)(logits)).count("pallas_call")

    assert kernels() == 0
    for capability, runs in (("9.0", by == "kernel"), ("7.5", False)):
        with compiling_for(Platform("gpu", "a GPU", capability)):
            assert kernels() == 2 * runs
