"""Capped scores on a GPU, by the Triton kernels: python -m pytest -m gpu."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.kernels.attention import attention
from tests.kernels.cases import Case, check, inputs_of
from tests.kernels.test_softcap import SOFTCAP, written_out

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=512, H=8, G=2, K=128, documents=5),
        Case(B=2, T=512, H=8, G=4, K=256, window=100),
        Case(B=2, T=512, H=8, G=2, K=64),
    ],
    ids=str,
)
def test_it_agrees_with_scores_written_out(case):
    x = inputs_of(case)

    @jax.jit
    def run(q, k, v):
        attend = lambda *a: attention(*a, x.mask, softcap=SOFTCAP, backend="triton")  # noqa: E731
        result, pullback = jax.vjp(attend, q, k, v)
        return *result, *pullback((x.d_out, x.d_lse))

    upcast = [a.astype(jnp.float32) for a in (x.q, x.k, x.v)]
    with jax.default_matmul_precision("highest"):
        result, pullback = jax.vjp(lambda *a: written_out(*a, x.mask, SOFTCAP), *upcast)
        wanted = [*result, *pullback((x.d_out.astype(jnp.float32), x.d_lse))]
    check(list(run(x.q, x.k, x.v)), wanted, case.dtype)
