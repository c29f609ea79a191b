"""SwiGLU's kernels on a GPU, against XLA: python -m pytest -m gpu."""

import jax
import numpy as np
import pytest

from jaxpar.kernels import swiglu
from tests.kernels.test_swiglu import arguments, assert_measured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("elementwise_kernels")]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "F"), [(32, 1024), (70000, 1024), (4096, 14336)])
def test_the_kernels_compute_the_same(rows, F, scaled):
    """Also of more rows than the grid's second dim has room for."""
    gate_up, scale, d_y = arguments(rows, F, jax.numpy.bfloat16, scaled)
    for by_kernel, by_xla, given in (
        (swiglu.forward_by_kernel, swiglu.forward_by_xla, (gate_up, scale)),
        (swiglu.backward_by_kernel, swiglu.backward_by_xla, (gate_up, scale, d_y)),
    ):
        found, wanted = (np.asarray(f(*given), np.float32) for f in (by_kernel, jax.jit(by_xla)))
        assert np.mean(found != wanted) < 1e-2  # the last digit
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize(("rows", "F"), [(70000, 1024), (4096, 14336)])
def test_the_kernels_measure_what_they_write(rows, F, bad):
    gate_up, _, d_y = arguments(rows, F, jax.numpy.bfloat16, scaled=False)
    gate_up = gate_up if bad is None else gate_up.at[1, 2, 200].set(bad)
    forward, backward = swiglu.forward_by_kernel, swiglu.backward_by_kernel
    assert_measured(forward(gate_up, None, with_amax=True), forward(gate_up, None))
    assert_measured(backward(gate_up, None, d_y, with_amax=True), backward(gate_up, None, d_y))
