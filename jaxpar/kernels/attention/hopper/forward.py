"""The attention forward on Hopper: one producer of K and V tiles, and two consumers on wgmma.

A CTA processes a few tiles of queries sequentially, longest first. Each consumer has 64 of the
queries. It starts the scores of one tile of keys together with the product of the previous tile's
values. While it computes a softmax, the other consumer uses the tensor cores.

Source:   Shah et al. 2024 (2407.08608), FlashAttention-3: the two roles, and the overlap.
"""

import functools
from types import SimpleNamespace as Refs

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.blocks import ForwardBlocks
from jaxpar.kernels.attention.hopper.mask import key_tiles_of, seen_by_queries
from jaxpar.kernels.attention.hopper.mma import (
    LOG2E,
    ROW,
    KernelShape,
    M,
    accumulators,
    compiler,
    f32,
    i32,
    interpreter_scratch,
    mod,
    multiply,
    named,
    shape_of,
    smem,
    spread,
    transposed,
    varying_as,
)
from jaxpar.kernels.attention.reference import EMPTY_LSE
from jaxpar.kernels.attention.tiles import Bounds, Visits, mask_operands, tile_and_lane

#: Initial value of the running maximum. Finite, so that a row without visible keys is not NaN.
LOWEST = -1e30


def forward(q, k, v, bounds: Bounds, visits: Visits, blocks: ForwardBlocks, ctas: int, interpret):
    """Call the kernel.

    Args:     q: [B, T, H, K]. k, v: [B, S, G, K]. bounds: padded to full tiles. visits: by tile of
              queries. ctas: number of CTAs that share the tiles.
    Returns:  out [B, T, H, K]; lse float32 [B, H, T padded to full tiles].
    """
    s = shape_of(q, k, bounds, visits, blocks, interpret, blocks.heads)
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, min(ctas, _work(s))),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((s.B, s.H, s.T), f32),
        ),
        scratch_types=_scratch(s),
        grid=(min(ctas, _work(s)),),
        grid_names=("cta",),
        num_threads=s.consumers + 1,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )
    out, lse = kernel(q, k, v, *mask_operands(bounds, visits))
    return varying_as(out, q), varying_as(lse, q)


def _work(s: KernelShape) -> int:
    return s.T // s.q * s.B * s.H


def _scratch(s: KernelShape):
    barrier, n = plgpu.Barrier, s.stages
    scratch = dict(
        q=smem((s.q, s.K), s.dtype),
        k=smem((n, s.kv, s.K), s.dtype),
        v=smem((n, s.kv, s.K), s.dtype),
        lse=plgpu.SMEM((s.consumers, M), f32),
        q_full=barrier(num_arrivals=1 + bool(s.rows)),
        q_free=barrier(num_arrivals=s.consumers),
        k_full=barrier(num_arrivals=1 + bool(s.cols), num_barriers=n),
        v_full=barrier(num_barriers=n),
        k_free=barrier(num_arrivals=s.consumers, num_barriers=n),
        v_free=barrier(num_arrivals=s.consumers, num_barriers=n),
    )
    if not _out_over_queries(s):
        scratch["out"] = smem((s.q, s.K), s.dtype)
    if s.rows:
        scratch["rows"] = plgpu.SMEM((s.rows, s.q), i32)
    if s.cols:
        scratch["cols"] = plgpu.SMEM((n, s.cols, s.kv), i32)
    return scratch | interpreter_scratch(s, s.consumers, s.kv)


def _out_over_queries(s: KernelShape) -> bool:
    """Return whether the output reuses the queries' shared memory, which delays the next queries.

    At head dim 256, shared memory has no room for both.
    """
    return s.K == 256


def _kernel(s: KernelShape, ctas: int, *refs, **scratch):
    g, r = named(s, ["q", "k", "v", "mask", "out", "lse"], refs), Refs(**scratch)
    wg = lax.axis_index("warpgroup")
    pl.when(wg == s.consumers)(lambda: _producer(s, ctas, g, r))
    pl.when(wg < s.consumers)(lambda: _consumer(s, ctas, g, r, wg))


def _for_each_tile(s: KernelShape, ctas: int, body, visited):
    """Call `body(n, place, visited) -> visited` for each of this CTA's tiles.

    Tiles are ordered longest first and assigned to CTAs in alternating directions, so that no CTA
    has the longest tile of every round.
    """
    cta = lax.axis_index("cta")

    def nth(n):
        return n * ctas + jnp.where(mod(n, 2) == 1, ctas - 1 - cta, cta)

    def place(work):
        tile, b_h = tile_and_lane(work, s.T // s.q, s.B * s.H, s.heads * s.group)
        # Start with the last tile: in text order and in zigzag, the last queries have most keys.
        return lax.div(b_h, i32(s.H)), mod(b_h, s.H), s.T // s.q - 1 - tile

    rounds = -(-_work(s) // ctas)
    mine = rounds - (nth(i32(rounds - 1)) >= _work(s)).astype(i32)
    return lax.fori_loop(0, mine, lambda n, x: body(n, place(nth(n)), x), visited)


def _producer(s: KernelShape, ctas: int, g, r):
    plgpu.set_max_registers(24, action="decrease")

    def tile_body(n, place, visited):
        b, h, tile = place
        begin, _, _, end = key_tiles_of(s, g, b, tile)
        pl.when(n > 0)(lambda: plgpu.barrier_wait(r.q_free))
        queries = pl.ds(tile * s.q, s.q)
        plgpu.copy_gmem_to_smem(g.q.at[b, queries, h], r.q, r.q_full)
        if s.rows:
            plgpu.copy_gmem_to_smem(g.rows.at[b, :, queries], r.rows, r.q_full)
        kv_head = lax.div(h, i32(s.group))

        def load(i, _):
            tile_k = g.order[b, tile, i] if s.listed else i
            _load(s, g, r, b, kv_head, tile_k, visited + i - begin)

        lax.fori_loop(begin, end, load, None)
        return visited + end - begin

    visited = _for_each_tile(s, ctas, tile_body, i32(0))
    if s.interpret:  # the interpreter requires a wait for every phase of a barrier
        plgpu.barrier_wait(r.q_free)

        def see(i, _):
            plgpu.barrier_wait(r.k_free.at[mod(i, s.stages)])
            plgpu.barrier_wait(r.v_free.at[mod(i, s.stages)])

        lax.fori_loop(jnp.maximum(visited - s.stages, 0), visited, see, None)


def _load(s: KernelShape, g, r, b, kv_head, tile, count):
    """Load K and V of the visit `count` once its buffers are free."""
    slot, keys = mod(count, s.stages), pl.ds(tile * s.kv, s.kv)
    pl.when(count >= s.stages)(lambda: plgpu.barrier_wait(r.k_free.at[slot]))
    plgpu.copy_gmem_to_smem(g.k.at[b, keys, kv_head], r.k.at[slot], r.k_full.at[slot])
    if s.cols:
        plgpu.copy_gmem_to_smem(g.cols.at[b, :, keys], r.cols.at[slot], r.k_full.at[slot])
    pl.when(count >= s.stages)(lambda: plgpu.barrier_wait(r.v_free.at[slot]))
    plgpu.copy_gmem_to_smem(g.v.at[b, keys, kv_head], r.v.at[slot], r.v_full.at[slot])


def _consumer(s: KernelShape, ctas: int, g, r, wg):
    plgpu.set_max_registers(240, action="increase")
    _for_each_tile(s, ctas, functools.partial(_tile, s, g, r, wg), i32(0))
    plgpu.wait_smem_to_gmem(0)


def _tile(s: KernelShape, g, r, wg, n, place, visited):
    """Compute the output and log-sum-exp of 64 queries."""
    del n
    b, h, tile = place
    ranges = key_tiles_of(s, g, b, tile)
    plgpu.barrier_wait(r.q_full)
    first, mine = tile * s.q + wg * M, pl.ds(wg * M, M)
    rows = [plgpu.load(r.rows.at[i, mine], layout=ROW) for i in range(s.rows)]
    if s.rows:
        plgpu.commit_smem()  # the bounds are read before TMA overwrites them
    seen = functools.partial(seen_by_queries, s, r, rows, first)

    def whole(acc):
        top, total = _visit_all(s, r, wg, acc, visited, ranges, seen)
        return acc[...], top, total

    acc, top, total = accumulators(s, r, wg, whole, 1)
    out = acc * spread(jnp.where(total > 0, 1 / total, 0.0), acc.shape, 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    home = (r.q if _out_over_queries(s) else r.out).at[mine]
    home[...] = out.astype(s.dtype)
    r.lse[wg] = jnp.where(total > 0, top * (1 / LOG2E) + jnp.log(total), EMPTY_LSE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(home, g.out.at[b, pl.ds(first, M), h])
    plgpu.copy_smem_to_gmem(r.lse.at[wg], g.lse.at[b, h, pl.ds(first, M)])
    if _out_over_queries(s):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(r.q_free)
    return visited + ranges[3] - ranges[0]


def _softmax(s: KernelShape, scores, top, total, seen):
    """Return the weights of a tile, the factor to rescale previous ones, and the new statistics.

    Maxima are in base 2, so that scaling and subtraction are one instruction.
    """
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * s.log2_scale)
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * s.log2_scale - spread(new_top, scores.shape, 0))
    return weights, shrink, new_top, total * shrink + weights.sum(axis=1)


def _visit_all(s: KernelShape, r, wg, acc, visited, ranges, seen):
    """Add the weighted values of every visit to `acc`. Return the running maximum and total."""
    begin, whole, masked, end = ranges
    slot_of = lambda i: mod(visited + i - begin, s.stages)  # noqa: E731

    def add_values(weights, i):
        plgpu.barrier_wait(r.v_full.at[slot_of(i)])
        multiply(s, r, wg, acc, weights, r.v.at[slot_of(i)])

    def step(i, carry, with_mask):
        weights, top, total = carry
        scores = _scores(s, r, wg, slot_of(i), lambda: add_values(weights, i - 1))
        allowed = _allowed(s, r, seen, slot_of(i), i, with_mask)
        weights, shrink, top, total = _softmax(s, scores, top, total, allowed)
        plgpu.wgmma_wait(0)
        # Only now, because the product reads the registers of the previous weights until it ends.
        weights = lax.optimization_barrier(weights).astype(s.dtype)
        plgpu.barrier_arrive(r.v_free.at[slot_of(i - 1)])
        acc[...] = acc[...] * spread(shrink, (M, s.K), 0)
        return weights, top, total

    row = lambda x: plgpu.layout_cast(jnp.full((M,), x, f32), ROW)  # noqa: E731
    scores = _scores(s, r, wg, slot_of(begin))
    allowed = _allowed(s, r, seen, slot_of(begin), begin, True)
    weights, _, top, total = _softmax(s, scores, row(LOWEST), row(0), allowed)
    carry, at = (weights.astype(s.dtype), top, total), begin + 1
    stops = [(masked, False), (end, True)]
    for stop, with_mask in [(whole, True), *stops] if s.ranged else stops:
        carry = lax.fori_loop(at, stop, functools.partial(step, with_mask=with_mask), carry)
        at = jnp.maximum(at, stop)
    weights, top, total = carry
    if not _out_over_queries(s):
        plgpu.barrier_arrive(r.q_free)
    add_values(weights, end - 1)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(r.v_free.at[slot_of(end - 1)])
    return top, total


def _scores(s: KernelShape, r, wg, slot, beside=None):
    """Multiply 64 queries by a tile of keys, float32 [M, kv]. `beside` starts another product."""
    plgpu.barrier_wait(r.k_full.at[slot])

    def product(ref):
        plgpu.wgmma(ref, r.q.at[pl.ds(wg * M, M)], transposed(r.k.at[slot]))
        if beside is not None:
            beside()
        return plgpu.wgmma_accumulator_load(ref, wait_n=0 if beside is None else 1)

    return pl.run_scoped(product, plgpu.ACC((M, s.kv), f32))


def _allowed(s: KernelShape, r, seen, slot, i, with_mask: bool):
    """Compute the mask of a tile if it needs one, and release the buffer of its keys."""
    allowed = seen(slot, i) if with_mask else None
    if with_mask and s.cols:
        plgpu.commit_smem()  # the bounds are read before TMA overwrites them
    plgpu.barrier_arrive(r.k_free.at[slot])
    return allowed
