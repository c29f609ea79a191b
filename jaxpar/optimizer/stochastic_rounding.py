"""Stochastic rounding to bfloat16 of sharded arrays: the same bits on every mesh.

A value between two bfloat16 neighbors is rounded to one of them at random, so that the expected
result is the value. Rounding to nearest would drop every change below half the distance between
neighbors, so a slowly changing average would never change. The random numbers are a hash of a key
and of an element's index in the global array, so they do not depend on the mesh or on restarts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.sharding.hashing import hash_uint32, places


def random_bits(
    key: jax.Array, shape: tuple[int, ...], spec: PartitionSpec, rows: jax.Array
) -> jax.Array:
    """Return a random number for each element of some rows of a shard.

    The numbers depend only on the key and on the elements' indices in the global array.

    Args:     key: uint32 scalar. shape: shape of the rows; the first dim counts them. spec: the
              sharding of the global array. rows: int32, the rows' indices in the first dim of the
              global array.
    Returns:  uint32, `shape`.
    """
    column, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(1, len(shape))):
        place = places(shape[dim], spec[dim]).astype(jnp.uint32) * jnp.uint32(stride & 0xFFFFFFFF)
        column += lax.broadcast_in_dim(place, shape, (dim,))
        stride *= shape[dim] * (1 if spec[dim] is None else lax.axis_size(spec[dim]))
    row = lax.broadcast_in_dim(hash_uint32(rows.astype(jnp.uint32) + hash_uint32(key)), shape, (0,))
    return hash_uint32(hash_uint32(column ^ key) ^ row)


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 values to one of their two bfloat16 neighbors, the nearer one more often.

    Args:     x: float32. bits: uint32, x's shape; only the lower 16 bits are used.
    Returns:  bfloat16. Values that bfloat16 represents exactly, infinities and NaN are unchanged.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # bfloat16 is float32 without the lower 16 bits; a carry out of these rounds up.
    upper = (raw + (bits & jnp.uint32(0xFFFF))) >> 16
    rounded = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
