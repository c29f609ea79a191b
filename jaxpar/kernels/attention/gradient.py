"""The part of attention's gradient that is one number per query, common to the kernels."""

import jax
import jax.numpy as jnp


def delta(out, d_out, d_lse) -> jax.Array:
    """Compute what the softmax's gradient subtracts: the sum of out * d_out, less d_lse.

    Args:     out, d_out: [B, T, H, K]. d_lse: float32 [B, H, T].
    Returns:  float32 [B, H, T].
    """
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    return product.sum(-1).transpose(0, 2, 1) - d_lse
