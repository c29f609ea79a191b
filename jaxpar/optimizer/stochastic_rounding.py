"""Stochastic rounding to bfloat16 of sharded arrays: the same bits on every mesh.

A value between two neighbors goes to either, the nearer one more often, so that the mean is the
value. Rounding to the nearest would drop every change below half the distance; a slow average then
stands still. The random numbers are a hash of a key and of an element's place in the whole array,
so neither the mesh nor a restart has a say in them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.sharding.hashing import hash_uint32, places


def random_bits(
    key: jax.Array, shape: tuple[int, ...], spec: PartitionSpec, rows: jax.Array
) -> jax.Array:
    """A random number for each element of some rows of a shard, by its place in the whole array.

    Args:     key: uint32 scalar. shape: of those rows, the first dim counting them. spec: how the
              whole array is cut. rows: int32, their places in the first dim of the whole array.
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
    """Float32 to one of its two bfloat16 neighbors, the upper with the odds of its nearness.

    Args:     x: float32. bits: uint32 of its shape; the lower 16 bits of each are used.
    Returns:  bfloat16. What bfloat16 can hold stays as it is, infinities and NaN too.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # bfloat16 is float32 without the lower 16 bits: a carry out of them is the step up.
    upper = (raw + (bits & jnp.uint32(0xFFFF))) >> 16
    rounded = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
