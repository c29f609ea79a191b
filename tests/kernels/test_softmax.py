"""The kernels over logits, interpreted, against XLA's and against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import softmax
from jaxpar.kernels.platform import Platform, compiling_for

LOGITS = [jnp.float32, jnp.bfloat16]

BLOCK = 256


def draw(rows: int, columns: int, dtype) -> jax.Array:
    return (3 * jax.random.normal(jax.random.key(0), (rows, columns))).astype(dtype)


def of_rows(logits: jax.Array) -> tuple[jax.Array, ...]:
    """Of `gradient`: log-partition, slope, label and weight of each row; some have no label."""
    n, V = logits.shape
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1)
    label = jnp.asarray(([0, V - 1, V // 2, -100, V, -1, 3] * n)[:n], jnp.int32)
    weight = jnp.asarray(([1, 1, 1, 0, 1, 1, 1] * n)[:n], jnp.float32)
    return lse, weight * (1 + 0.1 * lse), label, weight


@pytest.mark.parametrize("dtype", LOGITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "columns", [256, 272, 1008], ids=["a block", "and a vector", "the last cut"]
)
def test_the_kernels_compute_the_same(columns, dtype):
    logits = draw(9, columns, dtype)
    base, total = softmax.sum_by_kernel(logits, block=BLOCK, interpret=True)
    largest, wanted = softmax.sum_by_xla(logits)
    assert base.dtype == total.dtype == jnp.float32
    np.testing.assert_array_equal(base, logits[:, :BLOCK].astype(jnp.float32).max(axis=1))
    np.testing.assert_allclose(total * jnp.exp(base - largest), wanted, rtol=3e-6)
    for out in {dtype, jnp.bfloat16}:
        run = dict(block=BLOCK, interpret=True)
        found = softmax.gradient_by_kernel(logits, *of_rows(logits), dtype=out, **run)
        wanted = softmax.gradient_by_xla(logits, *of_rows(logits), dtype=out)
        assert found.dtype == wanted.dtype == out and found.shape == wanted.shape
        found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        np.testing.assert_allclose(found, wanted, rtol=2**-7 if out == jnp.bfloat16 else 1e-5)
        assert np.mean(np.isclose(found, wanted, rtol=1e-5)) > 0.99  # the rest: a last digit


def test_the_kernel_takes_logits_of_any_size():
    logits = np.random.default_rng(0).normal(size=(8, 1008)).astype(np.float32) * 40
    logits[1], logits[2, 7], logits[3, :1000], logits[4, 5] = -1e30, 3e38, -np.inf, np.nan
    logits[5, 900], logits[6, 900] = logits[5, :256].max() + 60, logits[6, :256].max() + 100
    found = softmax.sum_by_kernel(jnp.asarray(logits), block=BLOCK, interpret=True)
    base, total = (np.asarray(a, np.float64) for a in found)
    largest = logits.max(axis=1).astype(np.float64)
    wanted = np.log(np.exp(logits.astype(np.float64) - largest[:, None]).sum(axis=1))
    rest = [0, 1, 2, 3, 5, 6, 7]
    np.testing.assert_allclose(
        np.log(total[rest]) + (base - largest)[rest], wanted[rest], atol=2e-5
    )
    assert np.isnan(total[4]) and (total[rest] < softmax.MOST).all()
    # What fits goes by the first block; where it does not, the base is the largest.
    assert base[5] == logits[5, :256].max()
    np.testing.assert_array_equal(base[[2, 3, 6]], largest[[2, 3, 6]])


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
    rows = jax.eval_shape(of_rows, logits)

    def kernels() -> int:
        def both(logits, *rows):  # traced anew each time, so a function of its own
            return softmax.base_and_sum(logits), softmax.gradient(logits, *rows, dtype=jnp.bfloat16)

        return str(jax.make_jaxpr(both)(logits, *rows)).count("pallas_call")

    assert kernels() == 0
    for capability, runs in (("9.0", by == "kernel"), ("7.5", False)):
        with compiling_for(Platform("gpu", "a GPU", capability)):
            assert kernels() == 2 * runs
