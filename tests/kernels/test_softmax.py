"""Which logits the kernels take; `test_elementwise_hopper.py` interprets and lowers them."""

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
    ("columns", "dtype", "by"),
    [
        (1008, jnp.float32, "kernel"),
        (1008, jnp.bfloat16, "kernel"),
        (1008, jnp.float16, "XLA"),
        (1001, jnp.bfloat16, "XLA"),
        (112, jnp.bfloat16, "XLA"),
    ],
    ids=["float32", "bfloat16", "float16", "length", "few"],
)
def test_the_kernels_are_for_gpus_and_some_shapes(columns, dtype, by):
    logits = jax.ShapeDtypeStruct((8, columns), dtype)

    def kernels() -> int:
        def both(logits):  # traced anew each time, so a function of its own
            return softmax.base_and_sum(logits), softmax.exponentials(logits, dtype=jnp.bfloat16)

        return str(jax.make_jaxpr(both)(logits)).count("mpmd_map[")

    assert kernels() == 0
    for capability, runs in (("9.0", by == "kernel"), ("8.9", False)):
        with compiling_for(Platform("gpu", "a GPU", capability)):
            assert kernels() == 2 * runs
