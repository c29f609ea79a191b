"""Hashes of global indices, which do not depend on the sharding."""

import jax
import jax.numpy as jnp
from jax import lax


def hash_uint32(x: jax.Array) -> jax.Array:
    """Map uint32 to uint32, one-to-one; every bit of the result depends on all bits of `x`.

    Source:   C. Wellons, hash-prospector: `lowbias32`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def places(size: int, axes: str | tuple[str, ...] | None) -> jax.Array:
    """Return the global indices of a device's `size` elements of a dim, int32.

    Args:     axes: mesh axes over which the dim is sharded.
    """
    own = jnp.arange(size, dtype=jnp.int32)
    return own if axes is None else own + lax.axis_index(axes) * size
