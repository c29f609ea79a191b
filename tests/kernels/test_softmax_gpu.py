"""The kernels over logits on a GPU, against XLA: python -m pytest -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels import softmax
from tests.kernels.test_softmax import LOGITS, draw, of_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", LOGITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [128_256, 16_032, 151_936, 272])
def test_the_kernels_compute_the_same(columns, dtype):
    logits = draw(512, columns, dtype).at[5, 3].set(jnp.nan)
    logits = logits.at[6, -1].set(1000)  # too far above the first block
    base, total = softmax.sum_by_kernel(logits)
    largest, wanted_total = jax.jit(softmax.sum_by_xla)(logits)
    assert np.isnan(total[5])
    rest = np.arange(512) != 5
    found = total * jax.numpy.exp(base - largest)
    np.testing.assert_allclose(found[rest], wanted_total[rest], rtol=1e-5)
    rows = of_rows(logits)
    wanted = jax.jit(softmax.gradient_by_xla, static_argnames="dtype")(
        logits, *rows, dtype=jnp.bfloat16
    )
    found = softmax.gradient_by_kernel(logits, *rows, dtype=jnp.bfloat16)
    found, wanted = (np.asarray(a[rest], np.float32) for a in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=2**-7)
    assert np.mean(found != wanted) < 1e-3  # a last digit, where an exponential's lies between two
