"""Attention sinks, added to a backend's result, against a key without a value written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import attention
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.kernels.attention.sinks import add_sinks, sinks_gradient
from jaxpar.kernels.attention.triton import api as triton
from tests.kernels.cases import NAMES, Case, check, errors, inputs_of
from tests.kernels.test_triton_interpreted import BACKWARD, FORWARD
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Of float32: absolute, with values about 1.
TOLERANCE = 1e-5


def sinks_of(case: Case) -> jax.Array:
    """Some far above the scores, some far below."""
    return jnp.linspace(-3.0, 5.0, case.H)


def written_out(q, k, v, sinks, mask):
    """Out and log-sum-exp in float32, with the sink as one more key whose value is 0."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(dense_mask(mask)[:, None], scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    every = jnp.concatenate([sink, scores], axis=-1)
    weights = jax.nn.softmax(every, axis=-1)[..., 1:]
    return jnp.einsum("bhts,bshk->bthk", weights, v), jax.nn.logsumexp(every, axis=-1)


def wanted_of(x, sinks) -> list[jax.Array]:
    """NAMES, and the gradient of the sinks."""
    upcast = [a.astype(jnp.float32) for a in (x.q, x.k, x.v)]

    @jax.jit
    def run(arrays, cotangents):
        result, pullback = jax.vjp(lambda *args: written_out(*args, x.mask), *arrays)
        return *result, *pullback(cotangents)

    with jax.default_matmul_precision("highest"):
        return list(run([*upcast, sinks], (x.d_out.astype(jnp.float32), x.d_lse)))


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=40, H=4, G=2, K=16, documents=3, dtype="float32"),
        slow(Case(T=40, H=3, G=3, K=16, window=7, dtype="float32")),
        Case("late", T=40, S=30, H=2, K=16, dtype="float32"),
    ],
    ids=str,
)
def test_attention_with_sinks_and_its_gradients(case):
    x, sinks = inputs_of(case), sinks_of(case)

    def attend(q, k, v, sinks):
        return attention(q, k, v, x.mask, sinks=sinks, backend="reference")

    @jax.jit
    def run(arrays, cotangents):
        result, pullback = jax.vjp(attend, *arrays)
        return *result, *pullback(cotangents)

    found = run((x.q, x.k, x.v, sinks), (x.d_out, x.d_lse))
    for name, ours, theirs in zip((*NAMES, "sinks"), found, wanted_of(x, sinks), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)


def test_a_query_that_sees_no_key_gives_its_weight_to_the_sink():
    x = inputs_of(Case("late", T=20, S=10, H=2, K=16, dtype="float32"))
    sinks = jnp.asarray([0.5, -2.0])
    out, lse = attention(x.q, x.k, x.v, x.mask, sinks=sinks, backend="reference")
    assert not np.any(out[:, :10])
    np.testing.assert_array_equal(lse[0, :, :10], np.repeat(sinks[:, None], 10, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(T=40, H=4, G=2, K=16, documents=2, dtype="float32"),
        Case("zigzag", T=64, S=128, K=64),
        Case(T=90, H=4, G=1, K=64, window=20),
    ],
    ids=str,
)
def test_the_backward_of_a_kernel_is_exact_with_sinks(case):
    """It is given the changed output and log-sum-exp, and knows nothing of sinks."""
    x, sinks = inputs_of(case), sinks_of(case)
    result = triton.forward(x.q, x.k, x.v, x.mask, blocks=FORWARD, interpret=True)
    out, lse = add_sinks(*result, sinks)
    rest = x.mask, out, lse, x.d_out, x.d_lse
    grads = triton.backward(x.q, x.k, x.v, *rest, blocks=BACKWARD, interpret=True)
    *wanted, d_sinks = wanted_of(x, sinks)
    check([out, lse, *grads], wanted, case.dtype)
    found = sinks_gradient(sinks, out, lse, x.d_out, x.d_lse)
    bound = TOLERANCE if case.dtype == "float32" else 5e-3
    assert np.linalg.norm(found - d_sinks) < bound * np.linalg.norm(d_sinks)


def test_sinks_far_below_change_nothing():
    x = inputs_of(Case(T=40, H=2, G=1, K=16, dtype="float32"))
    wanted = attention(x.q, x.k, x.v, x.mask, backend="reference")
    sinks = jnp.full(2, -1e9)
    found = attention(x.q, x.k, x.v, x.mask, sinks=sinks, backend="reference")
    zeros = [jnp.zeros_like(x.k)] * 3
    assert max(errors([*found, *zeros], [*wanted, *zeros]).values()) == 0


def test_sinks_of_another_number_of_heads_are_refused():
    x = inputs_of(Case(T=8, H=4, G=2, K=16, dtype="float32"))
    with pytest.raises(ValueError, match=r"sinks.shape = \(3,\) must be \(4,\), one number for"):
        attention(x.q, x.k, x.v, x.mask, sinks=jnp.zeros(3), backend="reference")
