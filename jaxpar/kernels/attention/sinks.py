"""Attention sinks: a learned score per head that joins the softmax's denominator, without a value.

A sink changes a row of the softmax only by a factor, which follows from the row's log-sum-exp. So
it is added to the result of any backend, and any backend's backward is exact for the changed output
and log-sum-exp: a key's weight is exp(score - lse), and out * d_out has no term of the sink.
"""

import jax
import jax.numpy as jnp

# ------------- The part of attention's gradient that is one number per query, common to the kernels


def delta(out, d_out, d_lse) -> jax.Array:
    """Compute what the softmax's gradient subtracts: the sum of out * d_out, less d_lse.

    Args:     out, d_out: [B, T, H, K]. d_lse: float32 [B, H, T].
    Returns:  float32 [B, H, T].
    """
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    return product.sum(-1).transpose(0, 2, 1) - d_lse


def add_sinks(out, lse, sinks) -> tuple[jax.Array, jax.Array]:
    """Add sinks to the result of attention.

    Args:     out: [B, T, H, K]. lse: float32 [B, H, T]. sinks: [H], or None for none.
    Returns:  out in its dtype, lse.
    Source:   OpenAI 2025 (2508.10925); Xiao et al. 2023 (2309.17453).
    """
    if sinks is None:
        return out, lse
    with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    share = jnp.exp(lse - with_sink).transpose(0, 2, 1)[..., None]
    return (out.astype(jnp.float32) * share).astype(out.dtype), with_sink


def sinks_gradient(sinks, out, lse, d_out, d_lse):
    """Compute the gradient of the sinks over these queries; None without sinks.

    Args:     out, lse: as returned by `add_sinks`. d_out, d_lse: their gradients.
    Returns:  [H], in the dtype of `sinks`.
    """
    if sinks is None:
        return None
    weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.sum(weight * delta(out, d_out, d_lse), axis=(0, 2)).astype(sinks.dtype)
