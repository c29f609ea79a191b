"""Capped scores, c * tanh(score / c): each backend that can, against JAX's own derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import attention, reference
from jaxpar.kernels.attention.capability import CAPABILITIES
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.kernels.attention.triton import api as triton
from jaxpar.kernels.platform import Platform, compiling_for
from tests.kernels.cases import NAMES, Case, errors, inputs_of
from tests.kernels.test_hopper_lowering import shapes_of
from tests.kernels.test_triton_interpreted import BACKWARD, FORWARD
from tests.kernels.test_triton_lowering import calls, lowered, on, programs
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Scores have a standard deviation of 1, so that some are far into the cap.
SOFTCAP = 0.8

#: Of float32: absolute, with values about 1.
TOLERANCE = 1e-5

HOPPER = Platform("gpu", "NVIDIA H200", "9.0")

CASES = [
    Case(B=2, T=40, H=4, G=2, K=16, documents=3, dtype="float32"),
    slow(Case(T=70, H=3, G=3, K=48, window=20, dtype="float32")),
    slow(Case("permuted", T=50, S=60, K=80, H=4, G=1, documents=2, dtype="float32")),
]


def written_out(q, k, v, mask, softcap: float):
    """Out and log-sum-exp."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(dense_mask(mask)[:, None], softcap * jnp.tanh(scores / softcap), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v), jax.nn.logsumexp(scores, axis=-1)


@functools.cache
def wanted_of(case: Case) -> list[np.ndarray]:
    """NAMES, by JAX's derivative."""
    x = inputs_of(case)
    with jax.default_matmul_precision("highest"):
        result, pullback = jax.vjp(lambda *a: written_out(*a, x.mask, SOFTCAP), x.q, x.k, x.v)
        return [*result, *pullback((x.d_out, x.d_lse))]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_forward_and_backward(backend, case):
    x, options = inputs_of(case), {"softcap": SOFTCAP}
    first, second = reference.forward, reference.backward
    if backend == "triton":
        first = functools.partial(triton.forward, blocks=FORWARD, interpret=True)
        second = functools.partial(triton.backward, blocks=BACKWARD, interpret=True)
    with jax.default_matmul_precision("highest"):
        out, lse = first(x.q, x.k, x.v, x.mask, **options)
        grads = second(x.q, x.k, x.v, x.mask, out, lse, x.d_out, x.d_lse, **options)
    for name, found, wanted in zip(NAMES, (out, lse, *grads), wanted_of(case), strict=True):
        assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= TOLERANCE, name


def test_the_cap_counts():
    case = CASES[0]
    x = inputs_of(case)
    plain = reference.forward(x.q, x.k, x.v, x.mask)[0]
    assert np.abs(np.asarray(plain) - np.asarray(wanted_of(case)[0])).max() > 0.05


def test_the_api_differentiates_it():
    x = inputs_of(CASES[0])
    run = lambda *a: attention(*a, x.mask, softcap=SOFTCAP, backend="reference")  # noqa: E731
    with jax.default_matmul_precision("highest"):
        result, pullback = jax.vjp(run, x.q, x.k, x.v)
        found = [*result, *pullback((x.d_out, x.d_lse))]
    assert max(errors(found, wanted_of(CASES[0])).values()) <= TOLERANCE


@pytest.mark.parametrize("backend", [n for n, can in CAPABILITIES.items() if not can.softcap])
def test_a_backend_that_cannot_says_so(backend):
    x = inputs_of(Case(T=64, H=2, G=1, K=64, dtype="bfloat16"))
    with compiling_for(HOPPER), pytest.raises(ValueError, match=r"cannot cap scores"):
        attention(x.q, x.k, x.v, x.mask, softcap=SOFTCAP, backend=backend)


@pytest.mark.parametrize("K", [128, slow(256)])
def test_it_lowers_for_gpus(K):
    x = shapes_of((2, 1024, 1024, 4, 2, K), "packed window general")
    for program, arguments in programs("9.0", x):
        capped = functools.partial(program, softcap=50.0)
        with compiling_for(HOPPER):
            assert calls(lowered(on("9.0"), capped, *arguments))
