"""The heads of a delta rule: queries, keys and values, from the output of the convolution."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig

#: Added to the squared length of queries and keys.
_EPS = 1e-6


def delta_heads(
    mixed: jax.Array, keys: int, m: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, G, K] and values [B, T, H, V].

    Args:     mixed: float32 [B, T, C]. keys: the channels of all keys, G K.
    Returns:  in the compute dtype.
    """
    q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
    by_head = lambda a, dim: a.reshape(*a.shape[:2], -1, dim)  # noqa: E731
    q, k = (_unit(by_head(a, m.linear_key_head_dim)) for a in (q, k))
    v = by_head(v, m.linear_value_head_dim)
    q = q / math.sqrt(m.linear_key_head_dim)
    return q.astype(m.dtype), k.astype(m.dtype), v.astype(m.dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + _EPS)
