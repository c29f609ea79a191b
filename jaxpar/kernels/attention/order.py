"""The order in which the kernels' programs start.

A lane is one row and head. Programs that run side by side read the same keys, or the same queries,
if they are tiles of the same few lanes. These then stay in the L2 cache.
"""

import math

import jax.numpy as jnp
from jax import lax

#: Number of multiprocessors of an H100 or H200 module.
MULTIPROCESSORS = 132
#: Fraction of the multiprocessors that tiles should occupy. It allows 128 tiles, a power of two.
NEARLY = 0.95


def lanes_at_a_time(tiles: int, lanes: int, wanted: int) -> int:
    """Return the number of lanes whose tiles are processed together, before those of other lanes.

    It is the smallest divisor of `lanes` that is at least `wanted` and gives nearly every
    multiprocessor a tile. With fewer lanes, the long tiles of the last lanes would start when the
    others are nearly done.

    Args:     tiles: tiles per lane. lanes: rows times heads. wanted: 0 means all lanes.
    """
    fewest = max(wanted, math.ceil(NEARLY * MULTIPROCESSORS / tiles)) if wanted else lanes
    return next(n for n in range(1, lanes + 1) if lanes % n == 0 and n >= min(fewest, lanes))


def tile_and_lane(work, tiles: int, lanes: int, at_a_time: int):
    """Return the tile and the lane (row and head) of a work item. Neighbors share a tile.

    Args:     work: int32 scalar below tiles * lanes. lanes: rows times heads.
              at_a_time: number of lanes whose tiles come before those of all other lanes, rounded
              down to a common divisor with `lanes`. 0 means all lanes.
    Returns:  int32 scalars.
    """
    side_by_side = math.gcd(lanes, at_a_time)
    if side_by_side == lanes:
        return _divided(work, lanes)
    these, rest = _divided(work, tiles * side_by_side)
    tile, lane = _divided(rest, side_by_side)
    return tile, these * side_by_side + lane


def _divided(a, n: int):
    """Return quotient and remainder of a non-negative int32."""
    return lax.div(a, jnp.int32(n)), lax.rem(a, jnp.int32(n))
