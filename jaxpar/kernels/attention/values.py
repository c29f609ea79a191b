"""Values whose head dim is smaller than that of queries and keys, as in latent attention.

A kernel that has one head dim computes them exactly: v is padded with zeros, which add columns of
zeros to the output, and these are cut off. DeepSeek's 192 and 128 then cost 6/5 of the products.
"""

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.dispatch.capability import takes_narrow_values
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.kernels.platform import Platform


def widen(
    backend: str, mask: AttentionMask, q: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Pad the last dimension of arrays to q's head dim, if a backend needs it.

    Args:     arrays: v, and for a backward out and d_out: [..., I], I at most q's head dim.
    """
    if takes_narrow_values(backend, Platform.here(), packed=mask.q_segments is not None):
        return arrays
    more = [q.shape[-1] - a.shape[-1] for a in arrays]
    return tuple(_padded(a, by) if by else a for a, by in zip(arrays, more, strict=True))


def _padded(a: jax.Array, by: int) -> jax.Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, by)])
