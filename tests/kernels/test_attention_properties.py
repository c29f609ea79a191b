"""Attention at shapes and masks that nobody thought of: hypothesis looks for one that is wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.attention.reference import EMPTY_LSE
from tests.kernels.cases import Case, check, inputs_of, interpreted, interpreter, reference_of

#: (B, T, S, H, G, K): a compiled program each, with every window and with and without documents.
SHAPES = [(1, 1, 1, 1, 1, 2), (2, 3, 9, 2, 1, 4), (1, 8, 5, 6, 3, 8), (3, 6, 6, 2, 2, 3)]
WINDOWS = [None, 1, 4]


@st.composite
def requests(draw):
    """q, k, v, mask, d_out, d_lse: values from a seed, and any mask."""
    B, T, S, H, G, K = draw(st.sampled_from(SHAPES))
    ids = lambda n, last: arrays(np.int32, (B, n), elements=st.integers(0, last))  # noqa: E731
    packed = draw(st.booleans())
    mask = AttentionMask(
        q_positions=draw(ids(T, 9)),
        kv_positions=draw(ids(S, 9)),
        q_segments=draw(ids(T, 2)) if packed else None,
        kv_segments=draw(ids(S, 2)) if packed else None,
        window=draw(st.sampled_from(WINDOWS)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    scale = draw(st.sampled_from([1e-3, 1, 30]))  # at 30 a softmax is nearly a choice of one key
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    q, k, v = scale * normal(B, T, H, K), normal(B, S, G, K), normal(B, S, G, K)
    return q, k, v, mask, normal(B, T, H, K), normal(B, H, T)


def seen_by(mask: AttentionMask) -> np.ndarray:
    """bool [B, T, S]."""
    back = mask.q_positions[:, :, None] - mask.kv_positions[:, None]
    seen = (back >= 0) & (back < (math.inf if mask.window is None else mask.window))
    if mask.q_segments is not None:
        seen &= mask.q_segments[:, :, None] == mask.kv_segments[:, None]
    return seen


def row_by_row(q, k, v, seen):
    """(out, lse) in float64: a softmax over the keys that a query sees, and over no others."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    out, lse = np.zeros(q.shape), np.full((B, H, T), EMPTY_LSE)
    for b, t, h in np.ndindex(B, T, H):
        keys, g = np.flatnonzero(seen[b, t]), h // (H // k.shape[2])
        if len(keys):
            scores = k[b, keys, g] @ q[b, t, h] / math.sqrt(K)
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights / weights.sum() @ v[b, keys, g]
            lse[b, h, t] = scores.max() + np.log(weights.sum())
    return out, lse


def plain(q, k, v, seen):
    """The same in jax.numpy, for autodiff; a row without keys is shown all, and then left out."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    sees = seen.any(-1)
    shown = (seen | ~sees[..., None])[:, None]
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(shown, scores, -jnp.inf)
    out = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.where(sees[..., None, None], out, 0), jnp.where(sees[:, None], lse, 0)


@jax.jit
def both(q, k, v, mask, seen, d_out, d_lse):
    """(out, lse) of the reference backend, its gradients, and those of `plain`."""

    def gradient(attend):
        return jax.vjp(attend, q, k, v)

    found, vjp = gradient(lambda *qkv: attention(*qkv, mask, backend="reference"))
    _, plain_vjp = gradient(lambda *qkv: plain(*qkv, seen))
    return found, vjp((d_out, d_lse)), plain_vjp((d_out, d_lse))


@given(requests())
def test_the_reference_backend(request_):
    q, k, v, mask, d_out, d_lse = request_
    seen = seen_by(mask)
    found, grads, plain_grads = both(q, k, v, mask, seen, d_out, d_lse)
    for a, b in zip(found, row_by_row(q, k, v, seen), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, plain_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, np.abs(b).max()))


@st.composite
def cases(draw):
    """Any kind of mask, over up to three tiles of queries and of keys."""
    order = draw(st.sampled_from(["text", "permuted", "late"]))
    lengths = st.integers(1, 300)
    return Case(
        order,
        T=draw(lengths),
        S=None if order == "text" else draw(lengths),
        H=draw(st.integers(1, 2)),
        documents=draw(st.none() | st.integers(1, 9)),
        window=draw(st.none() | st.integers(1, 200)),
    )


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(cases(), st.booleans())
def test_the_hopper_kernels(case, deterministic):
    x = inputs_of(case)
    with interpreter() as races:
        found = interpreted(x, deterministic=deterministic)
        assert not any(races())
    check(found, reference_of(x), case.dtype)
