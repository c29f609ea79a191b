"""LayerNorm: rows with mean 0 and variance 1, times a gain, plus a bias."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.kernels.norm import SCALE


@jax.named_scope("norm")
def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Apply LayerNorm over the last dim, in float32. Returns x's dtype.

    Every remat policy saves the mean and the scale of each row, as it does for RMSNorm.

    Args:     x: [..., D]. gain, bias: [D].
    Source:   Ba et al. 2016 (1607.06450), equation 4.
    """
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(jnp.mean(wide, axis=-1, keepdims=True), SCALE)
    centered = wide - mean
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    scale = checkpoint_name(lax.rsqrt(variance + eps), SCALE)
    return (centered * scale * gain + bias).astype(x.dtype)
