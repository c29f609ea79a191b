"""The dq kernel for Hopper: each CTA sums its queries' gradient in registers, in a fixed order.

With this kernel, the backward needs seven matrix multiplications instead of five, and is
reproducible bit for bit. Head dim 256 always uses it, because dk and dv leave no registers for dq.
"""

import functools
from types import SimpleNamespace as Refs

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.blocks import DqBlocks
from jaxpar.kernels.attention.hopper.mask import key_tiles_of, seen_by_queries
from jaxpar.kernels.attention.hopper.mma import (
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
from jaxpar.kernels.attention.tiles import Bounds, Visits, mask_operands, tile_and_lane


def query_gradient(
    q, k, v, d_out, lse2, delta, bounds: Bounds, visits: Visits, blocks: DqBlocks, interpret: bool
) -> jax.Array:
    """Call the kernel. Arguments are as in `backward.backward`, but visits are by tile of queries.

    Returns:  dq [B, T, H, K] in q's dtype.
    """
    s = shape_of(q, k, bounds, visits, blocks, interpret)
    names = ["q", "k", "v", "d_out", "lse", "delta", "mask", "dq"]
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, names),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(s),
        grid=(s.T // s.q * s.B * s.H,),
        grid_names=("cta",),
        num_threads=s.consumers + 1,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )
    dq = kernel(q, k, v, d_out, lse2, delta, *mask_operands(bounds, visits))
    return varying_as(dq, q)


def _scratch(s: KernelShape):
    barrier, n = plgpu.Barrier, s.stages
    scratch = dict(
        q=smem((s.q, s.K), s.dtype),
        d_out=smem((s.q, s.K), s.dtype),
        lse=plgpu.SMEM((s.q,), f32),
        delta=plgpu.SMEM((s.q,), f32),
        k=smem((n, s.kv, s.K), s.dtype),
        v=smem((n, s.kv, s.K), s.dtype),
        q_full=barrier(num_arrivals=4 + bool(s.rows)),
        k_full=barrier(num_arrivals=2 + bool(s.cols), num_barriers=n),
        free=barrier(num_arrivals=s.consumers, num_barriers=n),
    )
    if s.rows:
        scratch["rows"] = plgpu.SMEM((s.rows, s.q), i32)
    if s.cols:
        scratch["cols"] = plgpu.SMEM((n, s.cols, s.kv), i32)
    return scratch | interpreter_scratch(s, s.consumers, s.kv)


def _kernel(s: KernelShape, names, *refs, **scratch):
    g, r = named(s, names, refs), Refs(**scratch)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg < s.consumers)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _consumer(s, g, r, wg)

    @pl.when(wg == s.consumers)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _producer(s, g, r)


def _place(s: KernelShape):
    """Return batch row, head and tile of queries, longest first."""
    tile, b_h = tile_and_lane(lax.axis_index("cta"), s.T // s.q, s.B * s.H, s.heads)
    if s.in_order:
        tile = s.T // s.q - 1 - tile
    return lax.div(b_h, i32(s.H)), mod(b_h, s.H), tile


def _producer(s: KernelShape, g, r):
    b, h, tile = _place(s)
    begin, _, _, end = key_tiles_of(s, g, b, tile)
    queries, kv_head = pl.ds(tile * s.q, s.q), lax.div(h, i32(s.group))
    plgpu.copy_gmem_to_smem(g.q.at[b, queries, h], r.q, r.q_full)
    plgpu.copy_gmem_to_smem(g.d_out.at[b, queries, h], r.d_out, r.q_full)
    plgpu.copy_gmem_to_smem(g.lse.at[b, h, queries], r.lse, r.q_full)
    plgpu.copy_gmem_to_smem(g.delta.at[b, h, queries], r.delta, r.q_full)
    if s.rows:
        plgpu.copy_gmem_to_smem(g.rows.at[b, :, queries], r.rows, r.q_full)
    free = lambda i: plgpu.barrier_wait(r.free.at[mod(i - begin, s.stages)])  # noqa: E731

    def load(i, _):
        slot = mod(i - begin, s.stages)
        keys = pl.ds((g.order[b, tile, i] if s.listed else i) * s.kv, s.kv)
        pl.when(i - begin >= s.stages)(lambda: free(i))
        plgpu.copy_gmem_to_smem(g.k.at[b, keys, kv_head], r.k.at[slot], r.k_full.at[slot])
        plgpu.copy_gmem_to_smem(g.v.at[b, keys, kv_head], r.v.at[slot], r.k_full.at[slot])
        if s.cols:
            plgpu.copy_gmem_to_smem(g.cols.at[b, :, keys], r.cols.at[slot], r.k_full.at[slot])

    lax.fori_loop(begin, end, load, None)
    if s.interpret:  # the interpreter requires a wait for every phase of a barrier
        last = jnp.maximum(end - s.stages, begin)
        lax.fori_loop(last, end, lambda i, _: free(i), None)


def _consumer(s: KernelShape, g, r, wg):
    """Compute dq of 64 queries."""
    b, h, tile = _place(s)
    begin, whole, masked, end = key_tiles_of(s, g, b, tile)
    mine, first = pl.ds(wg * M, M), tile * s.q + wg * M
    plgpu.barrier_wait(r.q_full)
    row = lambda ref: plgpu.load(ref.at[mine], layout=ROW)  # noqa: E731
    lse, delta = row(r.lse), row(r.delta)
    rows = [plgpu.load(r.rows.at[i, mine], layout=ROW) for i in range(s.rows)]

    def product(a, keys):
        def scoped(ref):
            plgpu.wgmma(ref, a.at[mine], transposed(keys))
            return plgpu.wgmma_accumulator_load(ref, wait_n=0)

        return pl.run_scoped(scoped, plgpu.ACC((M, s.kv), f32))

    def walk(acc):
        def step(i, _, with_mask):
            slot = mod(i - begin, s.stages)
            plgpu.barrier_wait(r.k_full.at[slot])
            scores = product(r.q, r.k.at[slot])
            weights = jnp.exp2(scores * s.log2_scale - spread(lse, scores.shape, 0))
            if with_mask:
                seen = seen_by_queries(s, r, rows, first, slot, i)
                weights = jnp.where(seen, weights, 0.0)
            if with_mask and s.cols:
                plgpu.commit_smem()  # the bounds are read before TMA overwrites them
            d_weights = product(r.d_out, r.v.at[slot])
            ds = weights * (d_weights - spread(delta, scores.shape, 0))
            multiply(s, r, wg, acc, ds.astype(s.dtype), r.k.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(r.free.at[slot])

        if s.ranged:
            lax.fori_loop(begin, whole, functools.partial(step, with_mask=True), None)
        lax.fori_loop(whole, masked, functools.partial(step, with_mask=False), None)
        lax.fori_loop(masked, end, functools.partial(step, with_mask=True), None)
        return acc[...]

    dq = accumulators(s, r, wg, walk, 1)
    r.q[mine] = (dq * s.K**-0.5).astype(s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r.q.at[mine], g.dq.at[b, pl.ds(first, M), h])
    plgpu.wait_smem_to_gmem(0)
