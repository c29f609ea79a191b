"""The mask inside the Hopper kernels: the tiles to visit, and the mask within a tile.

`g` are a kernel's operands in global memory, and `r` its shared memory. `tiles.py` has the rule.
"""

from types import SimpleNamespace as Refs

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import (
    COLUMN,
    KernelShape,
    M,
    cdiv,
    i32,
    iota,
    spread,
)


def key_tiles_of(s: KernelShape, g: Refs, b, tile):
    """Return the visits of a tile of queries as four int32 indices.

    Visits from the first index are masked, from the second unmasked, and from the third masked
    again. The fourth index is the end.
    """
    if s.ranged:  # + 0: otherwise the values keep the type of the mesh axes, which loops reject
        return tuple(g.ranges[b, tile, i] + 0 for i in range(4))
    first = tile * s.q
    end = jnp.minimum(cdiv(first + s.q, s.kv), s.S // s.kv)
    return i32(0), i32(0), jnp.minimum(lax.div(first + 1, i32(s.kv)), end), end


def query_tiles_of(s: KernelShape, g: Refs, b, tile):
    """Return the visits of a tile of keys, as `key_tiles_of`. Each head of the group is a visit."""
    if s.ranged:
        return tuple(g.ranges[b, tile, i] * s.group for i in range(4))
    first, end = tile * s.kv, i32(s.T // s.q * s.group)
    begin = lax.div(first, i32(s.q)) * s.group
    return begin, jnp.minimum(cdiv(first + s.kv - 1, s.q) * s.group, end), end, end


def seen_by_queries(s: KernelShape, r: Refs, rows, first, slot, key_tile):
    """Compute the mask of a tile: bool [M queries, kv keys].

    Args:     rows: the queries' bounds, with one value per row. first: index of the first query.
              slot: buffer of the keys' bounds.
    """
    shape, rows = (M, s.kv), iter(rows)
    column = lambda which: spread(  # noqa: E731
        plgpu.load(r.cols.at[slot, which], layout=COLUMN), shape, 1
    )
    if s.in_order:
        place = iota(shape, 1) + key_tile * s.kv
        seen = place <= iota(shape, 0) + first
    else:
        place = column(0)
        seen = place <= spread(next(rows), shape, 0)
    if s.has_low:
        seen &= place >= spread(next(rows), shape, 0)
    if s.has_segments:
        seen &= column(1) == spread(next(rows), shape, 0)
    return seen


def keys_seen(s: KernelShape, r: Refs, carried, first, slot, part, first_query):
    """Compute the mask of a tile: bool [M keys, M queries].

    Args:     carried: the keys' bounds, with one value per row. first: index of the first key.
              slot, part: location of the queries' bounds in shared memory.
    """
    shape, bound = (M, M), iter(range(s.rows))
    column = lambda: spread(  # noqa: E731
        plgpu.load(r.rows.at[slot, next(bound), part], layout=COLUMN), shape, 1
    )
    if s.in_order:
        place = iota(shape, 0) + first
        seen = place <= iota(shape, 1) + first_query
    else:
        place = spread(carried[0], shape, 0)
        seen = place <= column()
    if s.has_low:
        seen &= place >= column()
    if s.has_segments:
        seen &= spread(carried[1], shape, 0) == column()
    return seen
