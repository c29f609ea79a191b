"""Attention sinks on a GPU, on every backend: python -m pytest -m gpu."""

import jax
import numpy as np
import pytest

from jaxpar.kernels.attention import attention
from jaxpar.kernels.platform import Platform
from tests.kernels.cases import Case, check, inputs_of
from tests.kernels.test_sinks import sinks_of, wanted_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["cudnn", "pallas_hopper", "triton"])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=512, H=8, G=2, K=64, documents=5),
        Case(B=2, T=512, H=8, G=2, K=128, window=100),
    ],
    ids=str,
)
def test_sinks_agree_with_a_key_written_out(case, backend):
    if backend == "pallas_hopper" and Platform.here().compute_capability != "9.0":
        pytest.skip("no Hopper GPU")
    x, sinks = inputs_of(case), sinks_of(case)
    x = x.replace(d_lse=x.d_lse * 0)  # cuDNN has no gradient of the log-sum-exp

    @jax.jit
    def run(q, k, v, sinks, d_out):
        def attend(q, k, v, sinks):
            out, lse = attention(q, k, v, x.mask, sinks=sinks, backend=backend)
            return out, jax.lax.stop_gradient(lse)

        (out, lse), pullback = jax.vjp(attend, q, k, v, sinks)
        return out, lse, *pullback((d_out, lse * 0))

    *found, d_sinks = run(x.q, x.k, x.v, sinks, x.d_out)
    *wanted, wanted_of_sinks = wanted_of(x, sinks)
    check(found, wanted, case.dtype)
    error = np.linalg.norm(d_sinks - wanted_of_sinks)
    assert error < 5e-3 * np.linalg.norm(wanted_of_sinks)
