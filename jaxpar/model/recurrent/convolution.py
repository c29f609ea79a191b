"""The short convolution in front of a recurrence: causal, and of each channel alone."""

import jax
import jax.numpy as jnp

from jaxpar.parallel.recurrence import tokens_before


@jax.named_scope("convolution")
def causal_convolution(
    x: jax.Array, kernel: jax.Array, positions: jax.Array, before: jax.Array | None = None
) -> jax.Array:
    """Compute y_t = sum_j kernel[W-1-j] x_{t-j} of each channel, within the token's document.

    Args:     x: [B, T/sequence, C]. kernel: float32 [C, W]; the last number is that of the token
              itself. positions: int32 [B, T/sequence], in the document. before: [B, W-1, C], the
              tokens before x; None for those of the previous shard of the sequence.
    Returns:  float32 [B, T/sequence, C].
    Communication: that of `tokens_before` over SEQUENCE, unless `before` is given.
    """
    width, length = kernel.shape[1], x.shape[1]
    before = tokens_before(x, width - 1) if before is None else before
    padded = jnp.concatenate((before, x), axis=1)

    def tap(back: int) -> jax.Array:
        start = width - 1 - back
        same_document = (positions >= back)[..., None]
        token = jnp.where(same_document, padded[:, start : start + length], 0)
        return kernel[:, start] * token.astype(jnp.float32)

    return sum((tap(back) for back in range(1, width)), tap(0))
