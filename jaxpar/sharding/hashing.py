"""Hashes of places: the same number for a place, wherever it lies."""

import jax
import jax.numpy as jnp
from jax import lax


def hash_uint32(x: jax.Array) -> jax.Array:
    """uint32 to uint32, one to one, each bit of the result depending on all of `x`.

    Source:   C. Wellons, hash-prospector: `lowbias32`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def places(size: int, axes: str | tuple[str, ...] | None) -> jax.Array:
    """Places in a whole dim of the `size` elements that a device has of it, int32.

    Args:     axes: mesh axes over which the dim is cut.
    """
    own = jnp.arange(size, dtype=jnp.int32)
    return own if axes is None else own + lax.axis_index(axes) * size
