"""The fused attention backward on Hopper: five matrix multiplications in one pass over the scores.

A CTA owns a tile of keys of one KV head and iterates over the queries that attend to it, over all
heads of the group. It has four warpgroups, without circular waits:

    2 consumers   64 keys each. dk and dv stay in registers, and at head dim 64 v too. The gradient
                  of the scores, ds, is written to shared memory.
    1 producer    Loads queries and output gradients.
    1 for dq      Computes dq = ds k of each visit, which TMA adds to float32 rows in memory.

The order of these additions is not fixed, so the last bits of dq may differ from run to run.
Without "dq" among the results, the kernel is deterministic, and `dq.py` computes dq.

Source:   Dao 2023 (2307.08691), section 3.1.2; Shah et al. 2024 (2407.08608), section 3.1.
"""

import functools
from types import SimpleNamespace as Refs
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks
from jaxpar.kernels.attention.hopper.mask import keys_seen, query_tiles_of
from jaxpar.kernels.attention.hopper.mma import (
    COLUMN,
    ROW,
    KernelShape,
    M,
    accumulators,
    compiler,
    f32,
    held,
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
from jaxpar.kernels.attention.tiles import (
    Bounds,
    Visits,
    lanes_at_a_time,
    mask_operands,
    tile_and_lane,
)

type Place = tuple[Any, Any, Any]

#: Number of warpgroups that own 64 keys each.
CONSUMERS = 2


def backward(
    q,
    k,
    v,
    d_out,
    lse2,
    delta,
    bounds: Bounds,
    visits: Visits,
    blocks: BackwardBlocks,
    want: tuple[str, ...],
    interpret: bool,
) -> dict[str, jax.Array]:
    """Call the kernel.

    Args:     q, d_out: [B, T, H, K]. k, v: [B, S, G, K]. lse2, delta: the log-sum-exp in base 2,
              and the sum of out * d_out, float32 [B, H, T padded to full tiles].
              visits: by tile of keys.
              want: "dk", "dv" or both; with both, optionally "dq".
    Returns:  the requested gradients: dk, dv [B, S, G, K]; dq float32 [B, T, H, K], without the
              scale of the scores.
    """
    s = shape_of(q, k, bounds, visits, blocks, interpret, blocks.heads)
    operands = mask_operands(bounds, visits)
    names = ["q", "k", "v", "d_out", "lse", "delta", "mask"]
    tiles, made = s.S // s.kv, [name for name in want if name != "dq"]
    if "dq" in want:
        # A zero that depends on d_out. Otherwise XLA would allocate all layers' zeros at the start.
        zero, d_out = lax.optimization_barrier((f32(0), d_out))
        zeros = jnp.broadcast_to(zero, (tiles, *q.shape) if interpret else q.shape)
        dq = jax.new_ref(zeros)
        operands, names = [*operands, dq], [*names, "dq"]
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, want, [*names, *made]),
        out_type=tuple(jax.ShapeDtypeStruct(k.shape, k.dtype) for _ in made),
        scratch_types=_scratch(s, want),
        grid=(tiles * s.B * s.G,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1 + ("dq" in want),
        thread_name="warpgroup",
        compiler_params=compiler(),
    )
    results = kernel(q, k, v, d_out, lse2, delta, *operands)
    grads = {name: varying_as(x, k) for name, x in zip(made, results, strict=True)}
    if "dq" in want:
        total = jax.freeze(dq)
        grads["dq"] = varying_as(total.sum(0) if interpret else total, q)
    return grads


def _scratch(s: KernelShape, want):
    barrier, n, dk = plgpu.Barrier, s.stages, "dk" in want
    scratch = dict(
        k=smem((s.kv, s.K), s.dtype),
        q=smem((n, s.q, s.K), s.dtype),
        d_out=smem((n, s.q, s.K), s.dtype),
        lse=plgpu.SMEM((n, s.q), f32),
        k_full=barrier(num_arrivals=1 + dk + bool(s.cols)),
        q_full=barrier(num_arrivals=2 + bool(s.rows), num_barriers=n),
        d_out_full=barrier(num_arrivals=1 + dk, num_barriers=n),
        free=barrier(num_arrivals=CONSUMERS, num_barriers=n),
    )
    if dk:
        scratch["v"] = smem((s.kv, s.K), s.dtype)
        scratch["delta"] = plgpu.SMEM((n, s.q), f32)
    if "dq" in want:
        scratch["ds"] = smem((2, s.kv, s.q), s.dtype)
        scratch["dq"] = smem((2, M, M), f32)
        scratch["ds_full"] = barrier(num_arrivals=CONSUMERS, num_barriers=2)
        scratch["ds_free"] = barrier(num_barriers=2)
    if s.rows:
        scratch["rows"] = plgpu.SMEM((n, s.rows, s.q), i32)
    if s.cols:
        scratch["cols"] = plgpu.SMEM((s.cols, s.kv), i32)
    return scratch | interpreter_scratch(s, CONSUMERS, M)


def _kernel(s: KernelShape, want, names, *refs, **scratch):
    """Run the role of this warpgroup.

    The registers per thread of all warpgroups may add up to at most 512; with more, the kernel
    never starts. Of a consumer's 208, dk and dv use K. `_part` and `_part_of_small_heads` use the
    rest.
    """
    g, r = named(s, names, refs), Refs(**scratch)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(208 if "dq" in want else 240, action="increase")
        _consumer(s, want, g, r, wg)

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _producer(s, want, g, r)

    if "dq" in want:

        @pl.when(wg == CONSUMERS + 1)
        def _():
            plgpu.set_max_registers(72, action="decrease")
            _add_dq(s, g, r)


def _place(s: KernelShape) -> Place:
    """Return batch row, KV head and tile of keys. The first tiles have the most queries."""
    tiles, lanes = s.S // s.kv, s.B * s.G
    together = lanes_at_a_time(tiles, lanes, s.heads)
    tile, lane = tile_and_lane(lax.axis_index("cta"), tiles, lanes, together)
    return lax.div(lane, i32(s.G)), mod(lane, s.G), tile


def _visit(s: KernelShape, g, place: Place, i):
    """Return the tile of queries and the head of visit i."""
    b, kv_head, tile = place
    at = lax.div(i, i32(s.group))
    head = kv_head * s.group + i - at * s.group
    return (g.order[b, tile, at] if s.listed else at), head


def _producer(s: KernelShape, want, g, r):
    """Load keys and values, then the queries of each visit as soon as a buffer is free."""
    b, kv_head, tile = place = _place(s)
    begin, _, _, end = query_tiles_of(s, g, b, tile)
    keys = pl.ds(tile * s.kv, s.kv)
    plgpu.copy_gmem_to_smem(g.k.at[b, keys, kv_head], r.k, r.k_full)
    if "dk" in want:
        plgpu.copy_gmem_to_smem(g.v.at[b, keys, kv_head], r.v, r.k_full)
    if s.cols:
        plgpu.copy_gmem_to_smem(g.cols.at[b, :, keys], r.cols, r.k_full)
    free = lambda i: plgpu.barrier_wait(r.free.at[mod(i - begin, s.stages)])  # noqa: E731

    def load(i, _):
        pl.when(i - begin >= s.stages)(lambda: free(i))
        _load(s, want, g, r, place, mod(i - begin, s.stages), i)

    lax.fori_loop(begin, end, load, None)
    if s.interpret:  # the interpreter requires a wait for every phase of a barrier
        last = jnp.maximum(end - s.stages, begin)
        lax.fori_loop(last, end, lambda i, _: free(i), None)


def _load(s: KernelShape, want, g, r, place: Place, slot, i):
    """Load the queries of visit i, their output gradients, and the values of their rows."""
    b = place[0]
    at, h = _visit(s, g, place, i)
    queries = pl.ds(at * s.q, s.q)
    full, d_out_full = r.q_full.at[slot], r.d_out_full.at[slot]
    plgpu.copy_gmem_to_smem(g.q.at[b, queries, h], r.q.at[slot], full)
    plgpu.copy_gmem_to_smem(g.lse.at[b, h, queries], r.lse.at[slot], full)
    if s.rows:
        plgpu.copy_gmem_to_smem(g.rows.at[b, :, queries], r.rows.at[slot], full)
    plgpu.copy_gmem_to_smem(g.d_out.at[b, queries, h], r.d_out.at[slot], d_out_full)
    if "dk" in want:
        plgpu.copy_gmem_to_smem(g.delta.at[b, h, queries], r.delta.at[slot], d_out_full)


def _add_dq(s: KernelShape, g, r):
    """Add ds k of each visit to dq, in two parts of 64 x 64 to save registers.

    The parts are halves of a visit's 128 queries, or halves of the columns if a visit has 64.
    """
    b, _, tile = place = _place(s)
    begin, _, _, end = query_tiles_of(s, g, b, tile)
    halves = [pl.ds(n * M, M) for n in range(2)]
    plgpu.barrier_wait(r.k_full)

    def product(acc, ds, half):
        by_rows = s.q > M
        keys = r.k if by_rows else r.k.at[:, half]
        plgpu.wgmma(acc, transposed(ds.at[:, half] if by_rows else ds), keys)
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    def step(i, _):
        slot = mod(i - begin, 2)
        plgpu.barrier_wait(r.ds_full.at[slot])
        for n, half in enumerate(halves):
            scoped = functools.partial(product, ds=r.ds.at[slot], half=half)
            dq = pl.run_scoped(scoped, plgpu.ACC((M, M), f32))
            if n == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                plgpu.barrier_arrive(r.ds_free.at[slot])
            r.dq[n] = dq
        plgpu.commit_smem()
        at, h = _visit(s, g, place, i)
        for n, half in enumerate(halves):
            where = (pl.ds(at * s.q + n * M, M), h) if s.q > M else (pl.ds(at * s.q, M), h, half)
            # The interpreter cannot add in memory, so each tile of keys has its own rows there.
            target = g.dq.at[(tile, b, *where) if s.interpret else (b, *where)]
            plgpu.copy_smem_to_gmem(r.dq.at[n], target, reduction_op=None if s.interpret else "add")

    lax.fori_loop(begin, end, step, None)
    plgpu.wait_smem_to_gmem(0)


def _consumer(s: KernelShape, want, g, r, wg):
    """Compute dk and dv of 64 keys."""
    b, kv_head, tile = place = _place(s)
    mine = pl.ds(wg * M, M)
    plgpu.barrier_wait(r.k_full)
    carried = [plgpu.load(r.cols.at[i, mine], layout=ROW) for i in range(s.cols)]
    made = [name for name in want if name != "dq"]
    part_of = _part
    if "dq" in want and s.K == M:
        part_of = functools.partial(_part_of_small_heads, v=held(s, r.v.at[mine]))

    def whole(*accs):
        acc = dict(zip(made, accs, strict=True))
        n = _walk(s, g, r, wg, place, carried, acc, part_of, leave_ds="dq" in want)
        return *(acc[name][...] for name in made), n

    *values, n = accumulators(s, r, wg, whole, len(made))
    if "dq" in want:
        _until_ds_free(r, n)
    homes = {"dk": r.k, "dv": r.v if "dk" in want else r.k}
    for name, value in zip(made, values, strict=True):
        if name == "dk":
            value *= s.K**-0.5
        homes[name][mine] = value.astype(s.dtype)
        plgpu.commit_smem()
        rows = getattr(g, name).at[b, pl.ds(tile * s.kv + wg * M, M), kv_head]
        plgpu.copy_smem_to_gmem(homes[name].at[mine], rows)
    plgpu.wait_smem_to_gmem(0)


def _until_ds_free(r, n):
    """Wait for the last two visits of the dq warpgroup, which reads all of k until then."""
    pl.when(n >= 2)(lambda: plgpu.barrier_wait(r.ds_free.at[mod(n, 2)]))
    pl.when(n >= 1)(lambda: plgpu.barrier_wait(r.ds_free.at[mod(n + 1, 2)]))


def _walk(s: KernelShape, g, r, wg, place: Place, carried, acc, part_of, leave_ds: bool):
    """Sum dk and dv over all visits. Return the number of visits."""
    b, _, tile = place
    begin, whole, masked, end = query_tiles_of(s, g, b, tile)
    mine, first = pl.ds(wg * M, M), tile * s.kv + wg * M
    parts = [pl.ds(n * M, M) for n in range(s.q // M)]

    def step(i, _, with_mask):
        n = i - begin
        slot, ds_slot = mod(n, s.stages), mod(n, 2)
        at, _h = _visit(s, g, place, i)
        plgpu.barrier_wait(r.q_full.at[slot])
        for part in parts:

            def seen(part=part):
                where = at * s.q + part.start
                return keys_seen(s, r, carried, first, slot, part, where) if with_mask else None

            ds = part_of(s, r, wg, acc, slot, part, seen)
            if leave_ds:
                if part is parts[0]:
                    pl.when(n >= 2)(lambda: plgpu.barrier_wait(r.ds_free.at[ds_slot]))
                r.ds[ds_slot, mine, part] = ds
                if part is parts[-1]:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(r.ds_full.at[ds_slot])
            if "dk" in acc:
                multiply(s, r, wg, acc["dk"], ds, r.q.at[slot, part])
        if not leave_ds:
            plgpu.commit_smem()  # the queries' bounds are read before TMA overwrites them
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(r.free.at[slot])

    lax.fori_loop(begin, whole, functools.partial(step, with_mask=True), None)
    lax.fori_loop(whole, masked, functools.partial(step, with_mask=False), None)
    if s.ranged:
        lax.fori_loop(masked, end, functools.partial(step, with_mask=True), None)
    return end - begin


def _part(s: KernelShape, r, wg, acc, slot, part, seen):
    """Process 64 keys by 64 queries: add weights d_out to dv, and return ds if dk is requested.

    Rows are keys, so that dk and dv need no transpose of ds. ds is in the compute dtype.
    """
    mine, shape = pl.ds(wg * M, M), (M, M)
    queries, d_out = r.q.at[slot, part], r.d_out.at[slot, part]

    def scores(ref):
        plgpu.wgmma(ref, r.k.at[mine], transposed(queries))
        return plgpu.wgmma_accumulator_load(ref, wait_n=0)

    def gradient(ref):
        plgpu.wgmma(ref, r.v.at[mine], transposed(d_out))
        if "dv" in acc:
            multiply(s, r, wg, acc["dv"], weights, d_out)
        d_weights = plgpu.wgmma_accumulator_load(ref, wait_n=1 if "dv" in acc else 0)
        return (weights.astype(f32) * (d_weights - _column(r.delta, slot, part))).astype(s.dtype)

    weights = _weights(s, r, pl.run_scoped(scores, plgpu.ACC(shape, f32)), slot, part, seen)
    # Round here and do not keep the float32 weights: at head dim 128 there are not enough registers
    # for both, and without enough registers the compiler serializes all multiplications.
    weights = lax.optimization_barrier(weights.astype(s.dtype))
    if part.start == 0:
        plgpu.barrier_wait(r.d_out_full.at[slot])
    if "dk" in acc:
        return pl.run_scoped(gradient, plgpu.ACC(shape, f32))
    multiply(s, r, wg, acc["dv"], weights, d_out)
    return None


def _part_of_small_heads(s: KernelShape, r, wg, acc, slot, part, seen, v):
    """`_part` for all gradients at head dim 64, where dk and dv need half the registers of 128.

    This leaves registers for `v` of these 64 keys and for both products of the part: the second
    product runs while the weights are computed from the first. Weights are rounded for dv, but not
    for ds.
    """
    queries, d_out = r.q.at[slot, part], r.d_out.at[slot, part]

    def both(scores, d_weights):
        plgpu.wgmma(scores, r.k.at[pl.ds(wg * M, M)], transposed(queries))
        if part.start == 0:
            plgpu.barrier_wait(r.d_out_full.at[slot])
        plgpu.wgmma(d_weights, v, transposed(d_out))
        products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        weights = _weights(s, r, products, slot, part, seen)
        gradient = plgpu.wgmma_accumulator_load(d_weights, wait_n=0)
        ds = (weights * (gradient - _column(r.delta, slot, part))).astype(s.dtype)
        multiply(s, r, wg, acc["dv"], weights.astype(s.dtype), d_out)
        return ds

    return pl.run_scoped(both, *(plgpu.ACC((M, M), f32),) * 2)


def _weights(s: KernelShape, r, scores, slot, part, seen):
    """Compute the weights from a part's unscaled scores: float32 [64 keys, 64 queries]."""
    weights = jnp.exp2(scores * s.log2_scale - _column(r.lse, slot, part))
    allowed = seen()
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def _column(ref, slot, part):
    """Broadcast a value per query of a part over its keys: float32 [64 keys, 64 queries]."""
    return spread(plgpu.load(ref.at[slot, part], layout=COLUMN), (M, M), 1)
