"""The largest visible score of each query in Triton: the forward without weights and values."""

import functools

import jax
import jax.numpy as jnp

from jaxpar.kernels.attention.tiles import Bounds, Visits, mask_operands
from jaxpar.kernels.attention.triton.blocks import TritonForward
from jaxpar.kernels.attention.triton.compiler import div, f32, launch, rows
from jaxpar.kernels.attention.triton.shape import (
    TritonShape,
    bounds_of_columns,
    bounds_of_rows,
    key_tiles_of,
    load,
    named,
    place,
    product,
    seen,
    shape_of,
    visit_all,
)

#: The product of a query that sees no key.
LOWEST = -1e30


def largest(
    q, k, bounds: Bounds, visits: Visits, blocks: TritonForward, interpret: bool
) -> jax.Array:
    """Call the kernel.

    Args:     as `triton.forward.forward`.
    Returns:  the largest product of each query and a key that it sees: float32 [B, H, T].
    """
    s = shape_of(q, k, bounds, visits, blocks.q, blocks.kv, None, interpret)
    (found,) = launch(
        functools.partial(_kernel, s, blocks.heads),
        [q, k, *mask_operands(bounds, visits)],
        [((s.B, s.H, s.T), f32)],
        programs=s.T // s.q * s.B * s.H,
        warps=blocks.warps,
        stages=blocks.stages,
        name="attention_largest",
        interpret=interpret,
    )
    return found


def _kernel(s: TritonShape, heads: int, *refs):
    r = named(s, ["q", "k"], ["largest"], refs)
    # The last queries, which see most keys, come first.
    tile, b, h = place(s, s.T // s.q, s.H, heads)
    tile = s.T // s.q - 1 - tile
    first, g = tile * s.q, div(h, s.group)
    q, of_queries = load(s, r.q, b, first, s.q, h), bounds_of_rows(s, r, b, first)

    def visit(masked: bool, i, top):
        at = (r.order[b, tile, i] if s.listed else i) * s.kv
        scores = product(q, load(s, r.k, b, at, s.kv, g))
        if masked:
            of_keys = bounds_of_columns(s, r, b, at)
            visible = seen(s, of_queries, of_keys, first, at, queries=0)
            scores = jnp.where(visible, scores, LOWEST)
        return jnp.maximum(top, jnp.max(scores, axis=1))

    start = jnp.zeros((s.q,), f32) + LOWEST
    r.largest[b, h, rows(first, s.q)] = visit_all(s, key_tiles_of(s, r, b, tile), visit, start)
