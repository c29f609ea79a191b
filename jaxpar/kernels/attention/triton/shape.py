"""What a Triton kernel knows when it is compiled, and the operands that it names.

Triton's tiles have sizes that are powers of two. A head dim that is none is a sum of them, such as
96 = 64 + 32: a tile of K columns is a list of tiles, its parts, and a product of two tiles adds up
those of their parts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace as Refs
from typing import Any

import jax.numpy as jnp

from jaxpar.kernels.attention.tiles import Bounds, Visits, lanes_at_a_time, tile_and_lane
from jaxpar.kernels.attention.triton.compiler import (
    div,
    dot,
    f32,
    i32,
    iota,
    loop,
    mod,
    program,
    rows,
    spread,
)

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class TritonShape:
    """The static parameters of a kernel. T and S are multiples of the tile sizes q and kv.

    `rows` and `cols` count the mask's bounds.
    """

    B: int
    T: int
    S: int
    H: int
    G: int
    K: int
    dtype: Any
    q: int
    kv: int
    in_order: bool
    rows: int
    cols: int
    has_low: bool
    has_segments: bool
    ranged: bool
    listed: bool
    softcap: float | None
    interpret: bool

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.H // self.G

    @property
    def log2_scale(self) -> float:
        """Factor from a product of query and key to an exponent of 2."""
        return LOG2E * self.K**-0.5

    @property
    def product_cap(self) -> float:
        """The softcap of a product of query and key, which is not yet scaled."""
        assert self.softcap is not None
        return self.softcap * self.K**0.5

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First column and width of each part of the head dim, widest first."""
        found, first = [], 0
        for bit in reversed(range(self.K.bit_length())):
            if self.K & 1 << bit:
                found.append((first, 1 << bit))
                first += 1 << bit
        return found


def shape_of(
    q,
    k,
    bounds: Bounds,
    visits: Visits,
    q_rows: int,
    kv_rows: int,
    softcap: float | None,
    interpret: bool,
):
    """Return the static parameters of a call."""
    B, T, H, K = q.shape
    S, G = k.shape[1:3]
    count = lambda x: 0 if x is None else x.shape[1]  # noqa: E731
    return TritonShape(
        *(B, T, S, H, G, K, q.dtype, q_rows, kv_rows),
        *(bounds.in_order, count(bounds.queries), count(bounds.keys)),
        *(bounds.has_low, bounds.has_segments),
        *(visits.ranges is not None, visits.order is not None),
        softcap=softcap,
        interpret=interpret,
    )


def place(s: TritonShape, tiles: int, heads: int, kv_heads: int):
    """Return the tile, the row and the head of this program.

    Programs start in the order of their index. Neighbors compute the same tile of different heads;
    the heads of a group, which read the same keys, are side by side.

    Args:     tiles: number of tiles per head. heads: H or G. kv_heads: number of KV heads at a
              time; 0: all.
    """
    group = heads // s.G
    together = lanes_at_a_time(tiles * group, s.B * s.G, kv_heads) * group
    tile, lane = tile_and_lane(program(), tiles, s.B * heads, together)
    return tile, div(lane, heads), mod(lane, heads)


def named(s: TritonShape, operands: list[str], results: list[str], refs) -> Refs:
    """Name a kernel's references. Those of the mask, if any, follow the operands."""
    mask = dict(rows=s.rows, cols=s.cols, ranges=s.ranged, order=s.listed)
    names = [*operands, *(name for name, there in mask.items() if there), *results]
    return Refs(**dict(zip(names, refs, strict=True)))


def load(s: TritonShape, ref, b, first, count: int, head) -> list[Any]:
    """Load `count` rows of a head, as parts [count, width]."""
    return [ref[b, rows(first, count), head, rows(at, width)] for at, width in s.parts]


def store(s: TritonShape, ref, b, first, head, values) -> None:
    """Store the rows of a head in the reference's dtype. values: parts [rows, width]."""
    for (at, width), value in zip(s.parts, values, strict=True):
        count = value.shape[0]
        ref[b, rows(first, count), head, rows(at, width)] = value.astype(ref.dtype)


def zeros(s: TritonShape, count: int) -> list[Any]:
    """Return float32 accumulators [count, width], one per part."""
    return [jnp.zeros((count, width), f32) for _, width in s.parts]


def product(a, b):
    """Multiply a [m, K] with the transpose of b [n, K], both in parts: float32 [m, n]."""
    first, *others = (dot(x, y.T) for x, y in zip(a, b, strict=True))
    return sum(others, start=first)


def softcapped(s: TritonShape, products):
    """Cap products of queries and keys: C * tanh(product / C), if there is a softcap.

    tanh is computed from one exponential, with an absolute error of 1e-7: CUDA's own, which is
    exact near 0, takes longer.
    """
    if s.softcap is None:
        return products
    power = jnp.exp2(products * (2 * LOG2E / s.product_cap))
    return s.product_cap - (2 * s.product_cap) / (1 + power)


def softcap_slope(s: TritonShape, capped):
    """Return the derivative of `softcapped`, from its finite result; None without a softcap."""
    if s.softcap is None:
        return None
    share = capped * (1 / s.product_cap)
    return 1 - share * share


def through_softcap(d_scores, slope):
    """Multiply the gradient of capped scores by the slope, if there is one."""
    return d_scores if slope is None else d_scores * slope


def added(accumulators, a, b) -> list[Any]:
    """Add the product of a [m, n] and b [n, K], in parts, to accumulators [m, K]."""
    return [acc + dot(a, part) for acc, part in zip(accumulators, b, strict=True)]


# --------------- The mask inside the Triton kernels: the tiles to visit, and the mask within a tile
#
# `r` are a kernel's references. `kernels/attention/tiles.py` has the rule.


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
    for first, last, masked in ((begin, whole, True), (whole, rest, False), (rest, end, True)):
        carry = loop(first, last, functools.partial(body, masked), carry)
    return carry


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
