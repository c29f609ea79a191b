"""The heads of a delta rule: queries, keys and values, from the output of the convolution."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention

#: Added to the squared length of queries and keys.
_EPS = 1e-6


def delta_heads(
    mixed: jax.Array, keys: int, a: GatedDeltaNet | KimiDeltaAttention, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys [B, T, G, K] and values [B, T, H, V].

    Args:     mixed: float32 [B, T, C]. keys: the channels of all keys, G K.
              dtype: of the result, the compute dtype.
    """
    q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
    by_head = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)  # noqa: E731
    q, k = (_unit(by_head(x, a.key_head_dim)) for x in (q, k))
    v = by_head(v, a.value_head_dim)
    q = q / math.sqrt(a.key_head_dim)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + _EPS)
