"""The mask inside the Hopper kernels: which tiles to visit, and who sees whom in one.

`g` are a kernel's operands in memory, `r` its shared memory. See `tiles.py` for the rule.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import (
    COLUMN,
    KernelShape,
    M,
    Refs,
    cdiv,
    i32,
    iota,
    spread,
)


def key_tiles_of(s: KernelShape, g: Refs, b, tile):
    """Visits of a tile of queries: four places, int32.

    Visits are masked from the first, whole from the second, masked again from the third; the
    fourth is the end.
    """
    if s.ranged:  # + 0: read bare, a number keeps the mesh axes' type, and loops refuse it
        return tuple(g.ranges[b, tile, i] + 0 for i in range(4))
    first = tile * s.q
    end = jnp.minimum(cdiv(first + s.q, s.kv), s.S // s.kv)
    return i32(0), i32(0), jnp.minimum(lax.div(first + 1, i32(s.kv)), end), end


def query_tiles_of(s: KernelShape, g: Refs, b, tile):
    """As `key_tiles_of`, of a tile of keys; one visit for each head of the group."""
    if s.ranged:
        return tuple(g.ranges[b, tile, i] * s.group for i in range(4))
    first, end = tile * s.kv, i32(s.T // s.q * s.group)
    begin = lax.div(first, i32(s.q)) * s.group
    return begin, jnp.minimum(cdiv(first + s.kv - 1, s.q) * s.group, end), end, end


def seen_by_queries(s: KernelShape, r: Refs, rows, first, slot, key_tile):
    """bool [M queries, kv keys].

    Args:     rows: what the queries carry, one value per row each. first: the first query's index.
              slot: the buffer of what the keys carry.
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
    """bool [M keys, M queries].

    Args:     carried: what the keys carry, one value per row each. first: the first key's index.
              slot, part: where in shared memory is what the queries carry.
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
