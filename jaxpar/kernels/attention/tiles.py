"""The tiles of the score matrix that a mask allows, for kernels that skip the others.

A tile is (rows of queries) x (rows of keys). Kernels do not visit a tile in which everything is
masked, and apply no mask to a tile in which nothing is masked. In the other tiles, they compare
bounds that each query has, with one rule for all masks:

    low <= place of the key <= high, and the same segment

In text order, a key's place is its index, `high` is the query's index, and `low` is the start of
its document or window. The tiles to visit are then consecutive, and segments are not needed. In
other orders, places are positions, and the tiles to visit are listed.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.mask import AttentionMask

LAST = jnp.iinfo(jnp.int32).max
FIRST = jnp.iinfo(jnp.int32).min


@flax.struct.dataclass
class Bounds:
    """The bounds of each query and key, padded to full tiles. Which bounds exist is static.

    queries   int32 [B, R, T]: high (unless in order), low (if `has_low`), segment (if
              `has_segments`).
    keys      int32 [B, C, S]: place, segment (if `has_segments`). None in order.
    """

    queries: Any
    keys: Any
    in_order: bool = flax.struct.field(pytree_node=False)
    has_low: bool = flax.struct.field(pytree_node=False)
    has_segments: bool = flax.struct.field(pytree_node=False)

    @property
    def causal_alone(self) -> bool:
        """Whether the mask is only causal, in order, so that kernels load no bounds."""
        return self.in_order and not self.has_low


@flax.struct.dataclass
class Visits:
    """The tiles to visit for each tile of the outer loop (of queries, or of keys).

    ranges   int32 [B, outer, 4]. Visits [r0, r1) need the mask, [r1, r2) do not, [r2, r3) do. There
             is at least one visit. None if `causal_alone`: the kernel computes them.
    order    int32 [B, outer, inner]: the inner tile of each visit. None: visit i is tile i.
    """

    ranges: Any
    order: Any


def padding(length: int, block: int) -> int:
    """Return the number of rows to add to fill the last tile."""
    return -length % block


def bounds_of(mask: AttentionMask, pad_q: int, pad_k: int) -> Bounds:
    """Convert a mask to bounds. Padded queries have unused results, and padded keys are masked."""
    if mask.in_order:
        low = _low_in_order(mask)
        queries = None if low is None else _pad(low, pad_q, mode="edge")[:, None]
        return Bounds(queries, None, True, low is not None, False)
    rows = [_pad(mask.q_positions, pad_q, constant_values=FIRST)]
    cols = [_pad(mask.kv_positions, pad_k, constant_values=LAST)]
    if mask.window is not None:
        rows.append(_pad(mask.q_positions - (mask.window - 1), pad_q, constant_values=LAST))
    if mask.q_segments is not None:
        rows.append(_pad(mask.q_segments, pad_q, constant_values=0))
        cols.append(_pad(mask.kv_segments, pad_k, constant_values=0))
    has_segments = mask.q_segments is not None
    queries, keys = (jnp.stack(x, axis=1).astype(jnp.int32) for x in (rows, cols))
    return Bounds(queries, keys, False, mask.window is not None, has_segments)


def _pad(x, n: int, **how):
    return jnp.pad(x, ((0, 0), (0, n)), **how) if n else x


def _low_in_order(mask: AttentionMask) -> jax.Array | None:
    """Return the first visible key of each query, int32 [B, T], or None if it is always key 0."""
    index = lax.broadcasted_iota(jnp.int32, mask.q_positions.shape, 1)
    low = None
    if mask.q_segments is not None:
        begins = mask.q_segments != jnp.roll(mask.q_segments, 1, axis=1)
        low = lax.cummax(jnp.where(begins | (index == 0), index, 0), axis=1)
    if mask.window is not None:
        back = jnp.maximum(index - (mask.window - 1), 0)
        low = back if low is None else jnp.maximum(low, back)
    return low


def query_visits(bounds: Bounds, q: int, k: int, num_keys: int) -> Visits:
    """Return the tiles of k keys to visit for each tile of q queries. `num_keys` is padded."""
    if bounds.causal_alone:
        return Visits(None, None)
    if not bounds.in_order:
        return _listed(*_kinds(bounds, q, k))
    low_min, low_max = _extremes(bounds.queries[:, 0], q)
    first = lax.broadcasted_iota(jnp.int32, low_min.shape, 1) * q
    tiles = num_keys // k
    end = jnp.minimum(-(-(first + q) // k), tiles)
    return Visits(_ranges(low_min // k, -(-low_max // k), (first + 1) // k, end), None)


def key_visits(bounds: Bounds, q: int, k: int, num_queries: int, num_keys: int) -> Visits:
    """Return the tiles of q queries to visit for each tile of k keys."""
    if bounds.causal_alone:
        return Visits(None, None)
    if not bounds.in_order:
        partial, full = _kinds(bounds, q, k)
        return _listed(partial.swapaxes(1, 2), full.swapaxes(1, 2))
    low_min, low_max = _extremes(bounds.queries[:, 0], q)
    first = jnp.arange(num_keys // k, dtype=jnp.int32)[None] * k
    last = first + k - 1
    reach = lambda low, key: (low[:, None] <= key[..., None]).sum(-1, dtype=jnp.int32)  # noqa: E731
    tiles = num_queries // q
    begin, full_begin = jnp.minimum(first // q, tiles - 1), -(-last // q)
    return Visits(_ranges(begin, full_begin, reach(low_max, first), reach(low_min, last)), None)


def _ranges(begin, full_begin, full_end, end) -> jax.Array:
    end = jnp.maximum(end, begin + 1)
    full_begin = jnp.clip(full_begin, begin, end)
    full_end = jnp.clip(full_end, full_begin, end)
    return jnp.stack(jnp.broadcast_arrays(begin, full_begin, full_end, end), axis=-1)


def _extremes(x, block: int) -> tuple[jax.Array, jax.Array]:
    tiles = x.reshape(x.shape[0], -1, block)
    return tiles.min(-1), tiles.max(-1)


def _kinds(bounds: Bounds, q: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the tiles that need the mask and those that do not, bool [B, T/q, S/k] each."""
    rows, cols = iter(bounds.queries.swapaxes(0, 1)), iter(bounds.keys.swapaxes(0, 1))
    outer = lambda x, block: tuple(y[:, :, None] for y in _extremes(x, block))  # noqa: E731
    inner = lambda x, block: tuple(y[:, None] for y in _extremes(x, block))  # noqa: E731
    high_min, high_max = outer(next(rows), q)
    place_min, place_max = inner(next(cols), k)
    some, full = place_min <= high_max, place_max <= high_min
    if bounds.has_low:
        low_min, low_max = outer(next(rows), q)
        some, full = some & (place_max >= low_min), full & (place_min >= low_max)
    if bounds.has_segments:
        mine_min, mine_max = outer(next(rows), q)
        its_min, its_max = inner(next(cols), k)
        some &= (its_max >= mine_min) & (its_min <= mine_max)
        full &= (mine_min == mine_max) & (its_min == its_max) & (mine_min == its_min)
    return some & ~full, full & some


def _listed(partial, full) -> Visits:
    """List masked tiles first, then unmasked ones. If there are none, list the first, masked."""
    none = ~(partial | full).any(-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, partial.shape, 2)
    partial = partial | (none & (index == 0))
    kind = jnp.where(partial, 0, jnp.where(full, 1, 2))
    order = jnp.argsort(kind, axis=-1, stable=True).astype(jnp.int32)
    masked, whole = (x.sum(-1, dtype=jnp.int32) for x in (partial, full))
    ranges = jnp.stack([jnp.zeros_like(masked), masked, masked + whole, masked + whole], axis=-1)
    return Visits(ranges, order)


def mask_operands(bounds: Bounds, visits: Visits) -> list[Any]:
    """Return the kernels' operands of the mask that are present, in one order."""
    every = (bounds.queries, bounds.keys, visits.ranges, visits.order)
    return [x for x in every if x is not None]


# --------------------------------------------------- The order in which the kernels' programs start
#
# A lane is one row and head. Programs that run side by side read the same keys, or the same
# queries, if they are tiles of the same few lanes. These then stay in the L2 cache.


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
