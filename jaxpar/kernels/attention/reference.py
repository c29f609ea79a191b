"""Attention in plain jax.numpy: the readable reference, and the backend for CPUs.

All scores are in memory at once, so memory grows with T * S. Other backends are tested against it.
"""

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.mask import AttentionMask, dense_mask

#: The log-sum-exp of a row without visible keys. Finite, so that merging two such rows has no NaN.
EMPTY_LSE = -1e30


def forward(
    q, k, v, mask: AttentionMask, *, softcap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax attention and the log-sum-exp of its scores.

    Args:     q: [B, T, H, K]. k: [B, S, G, K], v: [B, S, G, I], H a multiple of G, I at most K.
              Any float dtype. softcap: c, to replace scores s by c * tanh(s / c).
    Returns:  out [B, T, H, I] in q's dtype (0 in a row without visible keys);
              lse float32 [B, H, T], natural logarithm (EMPTY_LSE in such a row).
    """
    scores, seen, _ = _scores(q, k, mask, softcap)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    total = jnp.sum(weights, axis=-1)
    weights /= jnp.maximum(total, 1e-30)[..., None]
    out = jnp.einsum("bgrts,bsgk->btgrk", weights.astype(q.dtype), v)
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), EMPTY_LSE)
    B, T, H, _ = q.shape
    return out.reshape(B, T, H, -1).astype(q.dtype), lse.reshape(B, H, T)


def backward(q, k, v, mask: AttentionMask, out, lse, d_out, d_lse, *, softcap: float | None = None):
    """Compute the gradients of attention from the saved output and log-sum-exp.

    If `out` and `lse` are those of *all* keys, the result is the contribution of the keys in `k`,
    so that ring attention can sum over key shards.

    Args:     out, d_out: [B, T, H, I]. lse, d_lse: float32 [B, H, T].
    Returns:  dq, dk, dv in the shapes and dtypes of q, k, v.
    Source:   Dao et al. 2022 (2205.14135), appendix B.
    """
    scores, seen, slope = _scores(q, k, mask, softcap)
    f32 = jnp.float32
    B, T, H, K = q.shape
    G = k.shape[2]
    grouped = lambda x: x.reshape(B, T, G, H // G, -1)  # noqa: E731
    per_row = lambda x: x.reshape(B, G, H // G, T)[..., None]  # noqa: E731
    weights = jnp.where(seen, jnp.exp(scores - per_row(lse)), 0)
    delta = jnp.einsum("bthk,bthk->bht", out, d_out, preferred_element_type=f32) - d_lse
    d_weights = jnp.einsum("btgrk,bsgk->bgrts", grouped(d_out), v, preferred_element_type=f32)
    d_scores = weights * (d_weights - per_row(delta))
    d_scores = d_scores if slope is None else d_scores * slope
    d_scores = (d_scores * K**-0.5).astype(q.dtype)
    dq = jnp.einsum("bgrts,bsgk->btgrk", d_scores, k).reshape(q.shape)
    dk = jnp.einsum("bgrts,btgrk->bsgk", d_scores, grouped(q))
    dv = jnp.einsum("bgrts,btgrk->bsgk", weights.astype(q.dtype), grouped(d_out))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(
    q, k, mask: AttentionMask, softcap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return masked scores, float32 [B, G, H/G, T, S], the mask, bool [B, 1, 1, T, S], and the
    derivative of the cap; None without one."""
    B, T, H, K = q.shape
    q_BTGRK = q.reshape(B, T, k.shape[2], -1, K)
    scores = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k, preferred_element_type=jnp.float32)
    seen = dense_mask(mask)[:, None, None]
    scores, slope = scores * K**-0.5, None
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
        slope = 1 - jnp.square(scores / softcap)
    return jnp.where(seen, scores, EMPTY_LSE), seen, slope
