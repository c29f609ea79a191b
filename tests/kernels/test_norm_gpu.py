"""RMS norm's backward kernel on a GPU, against XLA: python -m pytest -m gpu."""

import jax
import numpy as np
import pytest

from jaxpar.kernels import norm
from tests.kernels.test_norm import backward_arguments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", norm.LENGTHS)
@pytest.mark.parametrize("rows", [32, 4096])
@pytest.mark.parametrize("unscaled", [False, True])
def test_the_kernel_computes_the_same(rows, length, unscaled):
    arguments = backward_arguments(rows, length, jax.numpy.bfloat16)
    by_xla = jax.jit(norm.by_xla, static_argnames="unscaled")
    found, wanted = (f(*arguments, unscaled=unscaled) for f in (norm.by_kernel, by_xla))
    d_x, wanted_d_x = (np.asarray(a[0], np.float32) for a in (found, wanted))
    assert np.mean(d_x != wanted_d_x) < 1e-4  # the last digit, where a sum's order decides
    np.testing.assert_allclose(d_x, wanted_d_x, rtol=2**-7, atol=1e-6)
    max_magnitude = np.abs(wanted[1]).max()
    np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=1e-6 * max_magnitude)
