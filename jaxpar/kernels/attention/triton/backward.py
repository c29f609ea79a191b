"""The attention backward in Triton: a kernel for dk and dv, and one for dq.

Both compute the weights again from the scores and the log-sum-exp, seven products in total. Every
sum has a fixed order, so the results are reproducible bit for bit.

Source:   Dao 2023 (2307.08691), FlashAttention-2.
"""

import functools

import jax.numpy as jnp

from jaxpar.kernels.attention.tiles import Bounds, Visits, mask_operands
from jaxpar.kernels.attention.triton.blocks import TritonBackward
from jaxpar.kernels.attention.triton.compiler import (
    div,
    exp2,
    launch,
    mod,
    rows,
    spread,
)
from jaxpar.kernels.attention.triton.shape import (
    TritonShape,
    added,
    bounds_of_columns,
    bounds_of_rows,
    key_tiles_of,
    load,
    named,
    place,
    product,
    query_tiles_of,
    seen,
    shape_of,
    softcap_slope,
    softcapped,
    store,
    through_softcap,
    visit_all,
    zeros,
)

OPERANDS = ["q", "k", "v", "d_out", "lse2", "delta"]


def key_gradients(
    operands, bounds: Bounds, visits: Visits, blocks: TritonBackward, softcap, interpret
):
    """Compute dk and dv: a program computes one tile of keys, over all heads of the group.

    Args:     operands: q, d_out [B, T, H, K]; k, v [B, S, G, K]; lse2 and delta float32 [B, H, T],
              in the order of OPERANDS, all padded to full tiles. lse2: the log-sum-exp in base 2.
              visits: by tile of keys. softcap: of the scores; None for none.
    Returns:  dk, dv [B, S, G, K].
    """
    q, k, v = operands[:3]
    s = shape_of(q, k, bounds, visits, blocks.q, blocks.kv, softcap, interpret)
    return launch(
        functools.partial(_key_kernel, s, blocks.last_first, blocks.heads),
        [*operands, *mask_operands(bounds, visits)],
        [(k.shape, k.dtype), (v.shape, v.dtype)],
        programs=s.S // s.kv * s.B * s.G,
        warps=blocks.warps,
        stages=blocks.stages,
        name="attention_backward_keys",
        interpret=interpret,
    )


def query_gradient(
    operands, bounds: Bounds, visits: Visits, blocks: TritonBackward, softcap, interpret
):
    """Compute dq [B, T, H, K]: a program computes one tile of queries of one head.

    Args:     as `key_gradients`. visits: by tile of queries.
    """
    q, k = operands[:2]
    s = shape_of(q, k, bounds, visits, blocks.dq_q, blocks.dq_kv, softcap, interpret)
    (dq,) = launch(
        functools.partial(_query_kernel, s, blocks.dq_heads),
        [*operands, *mask_operands(bounds, visits)],
        [(q.shape, q.dtype)],
        programs=s.T // s.q * s.B * s.H,
        warps=blocks.dq_warps,
        stages=blocks.dq_stages,
        name="attention_backward_queries",
        interpret=interpret,
    )
    return dq


def _key_kernel(s: TritonShape, last_first: bool, heads: int, *refs):
    r = named(s, OPERANDS, ["dk", "dv"], refs)
    # The first keys, which most queries see, come first.
    tile, b, g = place(s, s.S // s.kv, s.G, heads)
    first = tile * s.kv
    k, v = (load(s, ref, b, first, s.kv, g) for ref in (r.k, r.v))
    of_keys = bounds_of_columns(s, r, b, first)
    visits = query_tiles_of(s, r, b, tile)

    def visit(masked: bool, i, carry):
        dk, dv = carry
        if last_first and not masked:
            i = visits[1] + visits[2] - 1 - i
        h, i = g * s.group + mod(i, s.group), div(i, s.group)
        at = (r.order[b, tile, i] if s.listed else i) * s.q
        q = load(s, r.q, b, at, s.q, h)
        scores = softcapped(s, product(k, q))
        slope = softcap_slope(s, scores)
        if masked:
            of_queries = bounds_of_rows(s, r, b, at)
            visible = seen(s, of_queries, of_keys, at, first, queries=1)
            scores = jnp.where(visible, scores, -jnp.inf)
        lse2, delta = (
            spread(ref[b, h, rows(at, s.q)], scores.shape, 1) for ref in (r.lse2, r.delta)
        )
        weights = exp2(scores, s.log2_scale, lse2)
        d_out = load(s, r.d_out, b, at, s.q, h)
        # Triton waits for this product and all before it, so that of dv comes after it.
        d_scores = through_softcap(weights * (product(v, d_out) - delta), slope)
        dv = added(dv, weights.astype(s.dtype), d_out)
        return added(dk, d_scores.astype(s.dtype), q), dv

    start = zeros(s, s.kv), zeros(s, s.kv)
    dk, dv = visit_all(s, visits, visit, start)
    store(s, r.dk, b, first, g, [part * s.K**-0.5 for part in dk])
    store(s, r.dv, b, first, g, dv)


def _query_kernel(s: TritonShape, heads: int, *refs):
    r = named(s, OPERANDS, ["dq"], refs)
    # The last queries, which see most keys, come first.
    tile, b, h = place(s, s.T // s.q, s.H, heads)
    tile = s.T // s.q - 1 - tile
    first, g = tile * s.q, div(h, s.group)
    q, d_out = (load(s, ref, b, first, s.q, h) for ref in (r.q, r.d_out))
    lse2, delta = (spread(ref[b, h, rows(first, s.q)], (s.q, s.kv), 0) for ref in (r.lse2, r.delta))
    of_queries = bounds_of_rows(s, r, b, first)

    def visit(masked: bool, i, dq):
        at = (r.order[b, tile, i] if s.listed else i) * s.kv
        k = load(s, r.k, b, at, s.kv, g)
        scores = softcapped(s, product(q, k))
        slope = softcap_slope(s, scores)
        if masked:
            of_keys = bounds_of_columns(s, r, b, at)
            visible = seen(s, of_queries, of_keys, first, at, queries=0)
            scores = jnp.where(visible, scores, -jnp.inf)
        weights = exp2(scores, s.log2_scale, lse2)
        d_weights = product(d_out, load(s, r.v, b, at, s.kv, g))
        d_scores = through_softcap(weights * (d_weights - delta), slope)
        return added(dq, d_scores.astype(s.dtype), k)

    dq = visit_all(s, key_tiles_of(s, r, b, tile), visit, zeros(s, s.q))
    store(s, r.dq, b, first, h, [part * s.K**-0.5 for part in dq])
