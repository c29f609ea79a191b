"""The mask inside the Triton kernels: the tiles to visit, and the mask within a tile.

`r` are a kernel's references. `kernels/attention/tiles.py` has the rule.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.refs import Refs
from jaxpar.kernels.attention.triton.compiler import div, i32, iota, rows, spread
from jaxpar.kernels.attention.triton.shape import TritonShape


def key_tiles_of(s: TritonShape, r: Refs | None, b, tile):
    """Return the visits of a tile of queries as four int32 indices.

    Visits from the first index are masked, from the second unmasked, and from the third masked
    again. The fourth index is the end.
    """
    if s.ranged:
        assert r is not None
        return tuple(r.ranges[b, tile, i] for i in range(4))
    first = tile * s.q
    end = jnp.minimum(div(first + (s.q + s.kv - 1), s.kv), s.S // s.kv)
    return i32(0), i32(0), jnp.minimum(div(first + 1, s.kv), end), end


def query_tiles_of(s: TritonShape, r: Refs | None, b, tile):
    """Return the visits of a tile of keys, as `key_tiles_of`. Each head of the group is a visit."""
    if s.ranged:
        assert r is not None
        return tuple(r.ranges[b, tile, i] * s.group for i in range(4))
    first, end = tile * s.kv, i32(s.T // s.q * s.group)
    begin = div(first, s.q) * s.group
    return begin, jnp.minimum(div(first + (s.kv + s.q - 2), s.q) * s.group, end), end, end


def visit_all(s: TritonShape, visits, body: Callable, carry: Any) -> Any:
    """Loop over the visits: `body(masked, visit, carry)`, where `masked` is static."""
    begin, whole, rest, end = visits
    loop = lambda masked: lambda visit, carry: body(masked, visit, carry)  # noqa: E731
    carry = lax.fori_loop(begin, whole, loop(True), carry)
    carry = lax.fori_loop(whole, rest, loop(False), carry)
    return lax.fori_loop(rest, end, loop(True), carry)


def bounds_of_rows(s: TritonShape, r: Refs, b, first) -> list[Any]:
    """Load the bounds of a tile's queries, int32 [q] each."""
    return [r.rows[b, i, rows(first, s.q)] for i in range(s.rows)]


def bounds_of_columns(s: TritonShape, r: Refs, b, first) -> list[Any]:
    """Load the bounds of a tile's keys, int32 [kv] each."""
    return [r.cols[b, i, rows(first, s.kv)] for i in range(s.cols)]


def seen(s: TritonShape, of_queries, of_keys, first_query, first_key, queries: int):
    """Compute the mask of a tile: bool [q, kv], or [kv, q].

    Args:     of_queries, of_keys: their bounds. first_query, first_key: their indices.
              queries: the axis of the queries.
    """
    keys = 1 - queries
    shape = (s.q, s.kv) if queries == 0 else (s.kv, s.q)
    bound = (spread(x, shape, queries) for x in of_queries)
    if s.in_order:
        place = iota(shape, keys) + first_key
        visible = place <= iota(shape, queries) + first_query
    else:
        place = spread(of_keys[0], shape, keys)
        visible = place <= next(bound)
    if s.has_low:
        visible &= place >= next(bound)
    if s.has_segments:
        visible &= spread(of_keys[1], shape, keys) == next(bound)
    return visible
