"""The attention forward in Triton: a program computes one tile of queries of one head.

On Hopper, tensor cores work while other instructions do. Triton waits for the scores before it
computes the weights from them, but not for a sum over visits such as the output. With `overlap`, a
visit therefore starts the product of the previous visit's weights before it computes its own.

Source:   Dao 2023 (2307.08691), FlashAttention-2.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxpar.kernels.attention.reference import EMPTY_LSE
from jaxpar.kernels.attention.tiles import Bounds, Visits, mask_operands
from jaxpar.kernels.attention.triton.blocks import TritonForward
from jaxpar.kernels.attention.triton.compiler import (
    div,
    exp2,
    f32,
    in_registers,
    launch,
    rows,
    spread,
)
from jaxpar.kernels.attention.triton.shape import (
    LOG2E,
    TritonShape,
    added,
    bounds_of_columns,
    bounds_of_rows,
    key_tiles_of,
    load,
    named,
    place,
    product,
    seen,
    shape_of,
    softcapped,
    store,
    visit_all,
    zeros,
)

#: Initial value of the running maximum. Finite, so that a row without visible keys is not NaN.
LOWEST = -1e30


def forward(
    q,
    k,
    v,
    bounds: Bounds,
    visits: Visits,
    blocks: TritonForward,
    softcap: float | None,
    interpret: bool,
):
    """Call the kernel.

    Args:     q: [B, T, H, K]. k, v: [B, S, G, K], all padded to full tiles. visits: by tile of
              queries.
    Returns:  out [B, T, H, K]; lse float32 [B, H, T].
    """
    s = shape_of(q, k, bounds, visits, blocks.q, blocks.kv, softcap, interpret)
    return launch(
        functools.partial(_kernel, s, blocks.overlap, blocks.heads),
        [q, k, v, *mask_operands(bounds, visits)],
        [(q.shape, q.dtype), ((s.B, s.H, s.T), f32)],
        programs=s.T // s.q * s.B * s.H,
        warps=blocks.warps,
        stages=blocks.stages,
        name="attention_forward",
        interpret=interpret,
    )


def _kernel(s: TritonShape, overlap: bool, heads: int, *refs):
    r = named(s, ["q", "k", "v"], ["out", "lse"], refs)
    # The last queries, which see most keys, come first.
    tile, b, h = place(s, s.T // s.q, s.H, heads)
    tile = s.T // s.q - 1 - tile
    first, g = tile * s.q, div(h, s.group)
    q, of_queries = load(s, r.q, b, first, s.q, h), bounds_of_rows(s, r, b, first)

    visits = key_tiles_of(s, r, b, tile)
    first_key = lambda i: (r.order[b, tile, i] if s.listed else i) * s.kv  # noqa: E731

    def add_values(acc, scaled_weights: tuple[Any, ...], i):
        kept, weights = scaled_weights
        values = load(s, r.v, b, first_key(i), s.kv, g)
        return added([part * kept[:, None] for part in acc], weights, values)

    def visit(masked: bool, i, carry):
        acc, top, total, waiting = carry
        at = first_key(i)
        scores = softcapped(s, product(q, load(s, r.k, b, at, s.kv, g)))
        if overlap:
            kept, weights = waiting
            before = kept, in_registers(weights, s.interpret)
            acc = add_values(acc, before, jnp.maximum(i - 1, visits[0]))
        if masked:
            of_keys = bounds_of_columns(s, r, b, at)
            visible = seen(s, of_queries, of_keys, first, at, queries=0)
            scores = jnp.where(visible, scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1) * s.log2_scale)
        kept = exp2(top, 1.0, higher)
        weights = exp2(scores, s.log2_scale, spread(higher, scores.shape, 0))
        total = total * kept + jnp.sum(weights, axis=1)
        weights = weights.astype(s.dtype)
        if overlap:
            return acc, higher, total, (kept, weights)
        return add_values(acc, (kept, weights), i), higher, total, ()

    row = jnp.zeros((s.q,), f32)
    waiting = (row, jnp.zeros((s.q, s.kv), s.dtype)) if overlap else ()
    start = zeros(s, s.q), row + LOWEST, row, waiting
    acc, top, total, waiting = visit_all(s, visits, visit, start)
    if overlap:
        acc = add_values(acc, waiting, visits[3] - 1)
    some = jnp.maximum(total, 1e-30)
    share = (1 / some)[:, None]
    store(s, r.out, b, first, h, [part * share for part in acc])
    lse = jnp.where(total > 0, top / LOG2E + jnp.log(some), EMPTY_LSE)
    r.lse[b, h, rows(first, s.q)] = lse
