"""A GLU's hidden values, and its gradients, each in one pass over the rows in use.

XLA also computes the rows that are not in use, and takes two passes for the gradients.
"""

import dataclasses
import functools
from types import SimpleNamespace as Refs

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import COLUMN, ROW, TILE, mod, smem, spread
from jaxpar.kernels.glu import ClampedSwiGLU, SwiGLU
from jaxpar.kernels.grouped_matmul.capability import HOPPER_WARPGROUP as WARPGROUP
from jaxpar.kernels.grouped_matmul.hopper import pipeline
from jaxpar.kernels.grouped_matmul.hopper.pipeline import CONSUMERS, DEFAULT, ROWS, Launch, M, div
from jaxpar.kernels.grouped_matmul.hopper.rows import COPYING, each_row, sigmoid
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: Columns of a step, 128 bytes, and buffers of the ring.
COLUMNS, STAGES = 64, 3

#: The most columns of a row that a warpgroup holds at a time, in `glu_hidden`.
MOST_COLUMNS = 1024
f32 = jnp.float32


def glu_hidden(
    glu: SwiGLU | ClampedSwiGLU,
    gate,
    up,
    scale,
    tiles: Tiles,
    biases=(None, None),
    ctas: int = COPYING,
) -> jax.Array:
    """`api.glu_hidden` for bfloat16 or float16, F a multiple of 128, tiles of 128."""
    F = gate.shape[1]
    columns = max(n for n in range(WARPGROUP, MOST_COLUMNS + 1, WARPGROUP) if F % n == 0)
    glu = dataclasses.replace(glu, sigmoid=sigmoid)
    of_experts = [bias for bias in biases if bias is not None]

    def row(r, gate, up, scale, *refs):
        *of_experts, out = refs
        for first in range(0, F, columns):
            here = pl.ds(first, columns)
            g, u = gate[r, here].astype(f32), up[r, here].astype(f32)
            if of_experts:
                *biases, experts = of_experts
                pairs = zip((g, u), biases, strict=True)
                g, u = (a + b[experts[div(r, ROWS)], here] for a, b in pairs)
            # The gradients are not used, so that the compiler can drop them.
            (hidden, *_), _ = glu.gradients(g, u, jnp.zeros_like(g), scale[r])
            out[r, here] = hidden.astype(out.dtype)

    if of_experts:
        of_experts.append(tiles.expert)
    like = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    return each_row(row, tiles, ctas, [like], gate, up, scale, *of_experts)[0]


def glu_backward(
    glu: SwiGLU | ClampedSwiGLU,
    gate,
    up,
    d_hidden,
    scale,
    tiles: Tiles,
    biases=(None, None),
    launch: Launch = DEFAULT,
):
    """`api.glu_backward` for bfloat16 or float16, F a multiple of 64, tiles of 128."""
    (R, F), dtype = gate.shape, gate.dtype
    of_experts = [bias for bias in biases if bias is not None]
    copies = 3 + len(of_experts)
    if of_experts:
        of_experts.append(tiles.expert)
    glu = dataclasses.replace(glu, sigmoid=sigmoid)
    like, barrier = jax.ShapeDtypeStruct((R, F), dtype), plgpu.Barrier
    scratch = dict(
        ins=smem((STAGES, 3, ROWS, COLUMNS), dtype),
        outs=smem((CONSUMERS, 3, M, COLUMNS), dtype),
        biases=plgpu.SMEM((STAGES, 2, COLUMNS), f32),
        scales=plgpu.SMEM((ROWS,), f32),
        totals=plgpu.SMEM((CONSUMERS, M), f32),
        full=barrier(num_arrivals=copies, num_barriers=STAGES),
        free=barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        scale_full=barrier(),
        scale_free=barrier(num_arrivals=CONSUMERS),
    )
    return pipeline.call(
        functools.partial(_kernel, glu, F // COLUMNS, launch),
        (like, like, like, jax.ShapeDtypeStruct((R,), f32)),
        scratch,
        launch.ctas,
        *(gate, up, d_hidden, *of_experts, scale, tiles.used),
    )


def _kernel(glu, steps: int, launch, *refs, **own):
    r, ins, (scale, used), outs, sums = Refs(**own), refs[:3], refs[-6:-4], refs[-4:-1], refs[-1]
    *biases, experts = refs[3:-6] or (None,)
    count, nth = pipeline.pieces_here(launch.ctas, used[0])

    biased = len(biases) > 0

    def consumer(wg):
        mine = pl.ds(pl.multiple_of(wg * M, M), M)

        def tile(i, _):
            rows = pl.ds(nth(i) * ROWS + wg * M, M)
            plgpu.barrier_wait(r.scale_full)
            s = plgpu.load(r.scales.at[mine], layout=ROW)
            plgpu.commit_smem()  # they are read before TMA overwrites them
            plgpu.barrier_arrive(r.scale_free)
            step = functools.partial(_step, r, glu, wg, mine, rows, i * steps, s, biased, outs)
            zero = plgpu.layout_cast(jnp.zeros((M,), f32), ROW)
            total = lax.fori_loop(0, steps, step, zero)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            r.totals[wg] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r.totals.at[wg], sums.at[rows])

        lax.fori_loop(0, count, tile, None)

    producer = functools.partial(
        _producer, r, steps, count, nth, ins, biases, scale, experts, launch
    )
    pipeline.roles(producer, consumer)


def _producer(r: Refs, steps: int, count, nth, ins, biases, scale, experts, launch: Launch) -> None:
    def tile(i, _):
        expert = experts[nth(i)] if biases else None
        rows = pl.ds(pl.multiple_of(nth(i) * ROWS, ROWS), ROWS)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(r.scale_free))
        plgpu.copy_gmem_to_smem(scale.at[rows], r.scales, r.scale_full)

        def step(c, _):
            at = i * steps + c
            slot, columns = mod(at, STAGES), pl.ds(c * COLUMNS, COLUMNS)
            pl.when(at >= STAGES)(lambda: plgpu.barrier_wait(r.free.at[slot]))
            for j, ref in enumerate(ins):
                plgpu.copy_gmem_to_smem(ref.at[rows, columns], r.ins.at[slot, j], r.full.at[slot])
            for j, ref in enumerate(biases):
                of_expert = ref.at[expert, columns]
                plgpu.copy_gmem_to_smem(of_expert, r.biases.at[slot, j], r.full.at[slot])

        lax.fori_loop(0, steps, step, None)

    lax.fori_loop(0, count, tile, None)
    if launch.interpret:  # the interpreter requires a wait for every phase of a barrier
        pl.when(count > 0)(lambda: plgpu.barrier_wait(r.scale_free))
        wait = lambda i, _: plgpu.barrier_wait(r.free.at[mod(i, STAGES)])  # noqa: E731
        lax.fori_loop(jnp.maximum(count * steps - STAGES, 0), count * steps, wait, None)


def _step(r: Refs, glu, wg, mine, rows, first, scale, biased: bool, outs, c, total):
    """Compute and store 64 columns of 64 rows. Return `total` plus the terms of d_scale."""
    slot = mod(first + c, STAGES)
    wide = lambda row: spread(row, (M, COLUMNS), 0)  # noqa: E731
    plgpu.barrier_wait(r.full.at[slot])
    ins = (plgpu.load(r.ins.at[slot, j, mine], layout=TILE) for j in range(3))
    g, u, d = (a.astype(f32) for a in ins)
    if biased:
        of_columns = (plgpu.load(r.biases.at[slot, j], layout=COLUMN) for j in range(2))
        g, u = (a + spread(b, (M, COLUMNS), 1) for a, b in zip((g, u), of_columns, strict=True))
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.free.at[slot])
    made, (act, value) = glu.gradients(g, u, d, wide(scale))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for j, a in enumerate(made):
        r.outs[wg, j] = a.astype(r.outs.dtype)
    plgpu.commit_smem()
    for j, ref in enumerate(outs):
        home = ref.at[rows, pl.ds(c * COLUMNS, COLUMNS)]
        plgpu.copy_smem_to_gmem(r.outs.at[wg, j], home)
    return total + jnp.sum(act * value * d, axis=1)
