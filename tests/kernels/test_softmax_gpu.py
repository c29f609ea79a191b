"""The kernels over logits on a GPU, against XLA: python -m pytest -m gpu."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import softmax
from tests.kernels.test_softmax import LOGITS, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("elementwise_kernels")]


@pytest.mark.parametrize("out", LOGITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", LOGITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [128_256, 16_032, 151_936, 272])
def test_the_kernels_compute_the_same(columns, dtype, out):
    logits = draw(512, columns, dtype).at[5, 3].set(jnp.nan)
    logits = logits.at[6, -1].set(1000)  # too far above the first block
    logits = logits.at[7, -1].set(70).at[8, columns // 2].set(45)  # a leap; all that is before it
    largest, wanted_total = jax.jit(softmax.sum_by_xla)(logits)
    rest = np.arange(512) != 5
    base, total = softmax.sum_by_kernel(logits)
    assert np.isnan(total[5])
    found = total * jax.numpy.exp(base - largest)
    np.testing.assert_allclose(found[rest], wanted_total[rest], rtol=1e-5)
    values, base, total = softmax.exponentials_by_kernel(logits, dtype=out)
    assert np.isnan(total[5]) and (base >= largest - softmax.LEAP)[rest].all()
    found = total * jax.numpy.exp(base - largest)
    np.testing.assert_allclose(found[rest], wanted_total[rest], rtol=1e-5)
    wanted = jnp.exp(logits.astype(jnp.float32) - base[:, None])[rest]
    found, wanted = np.asarray(values[rest], np.float32), np.asarray(wanted)
    tolerance = 2**-7 if out == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-30)
    assert np.isnan(np.asarray(values[5], np.float32)).any()


def test_rows_may_have_more_than_two_billion_numbers():
    """Every 64 rows are the same, the last ones 4 GiB from the first."""
    few = draw(64, 128_256, jnp.bfloat16)
    exponentials = functools.partial(softmax.exponentials_by_kernel, dtype=few.dtype)
    wanted = [*exponentials(few), *softmax.sum_by_kernel(few)]
    many = jnp.tile(few, (320, 1))
    assert many.size > 2**31
    found = [*jax.jit(exponentials)(many), *softmax.sum_by_kernel(many)]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a[-64:], np.float32), np.asarray(b, np.float32))
