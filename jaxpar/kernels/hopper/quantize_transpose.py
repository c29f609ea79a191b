"""Rounding to 8 bits and transposition in one pass, for GPUs since Hopper (Mosaic GPU).

TMA copies a tile of 16-bit numbers to shared memory, where a warpgroup reads it twice: by rows, and
by columns with instructions that transpose 8 x 8 numbers. It rounds both to 8 bits, and TMA copies
the results to memory. Rounding twice costs less than moving single bytes between threads.
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace as Refs
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import mod, smem, spread, transposed, varying_as
from jaxpar.kernels.attention.tiles import MULTIPROCESSORS
from jaxpar.kernels.float8.rounding import quantize
from jaxpar.kernels.grouped_matmul.hopper.pipeline import pieces_here, place

#: Rows that the four warps of a warpgroup read at a time.
M = 64
#: Register layouts of numbers read by rows, four side by side, and by columns, two of a column.
BY_ROWS, BY_COLUMNS = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA

f32 = jnp.float32


@dataclass(frozen=True)
class TileLaunch:
    """How the kernel runs.

    rows, columns   Of a tile: multiples of 64.
    buffers         Tiles of a CTA that are in transit or read.
    ctas            CTAs, each with one warpgroup: two per multiprocessor fit with these tiles.
    neighbors       Tiles of rows that go through all columns together.
    """

    rows: int = 128
    columns: int = 128
    buffers: int = 2
    ctas: int = 2 * MULTIPROCESSORS
    neighbors: int = 4


DEFAULT = TileLaunch()


def quantize_both_ways(
    x: jax.Array, scale: jax.Array, dtype: Any, factors: tuple[jax.Array, ...], launch: TileLaunch
) -> tuple[jax.Array, jax.Array]:
    """Compute `quantize(x, scale, dtype)` and its transpose.

    Args:     x: [rows, columns], 16 bits, full tiles of `launch`. scale: float32 scalar.
              factors: none, or float32 [rows] and [columns], by which x is multiplied before.
    Returns:  [rows, columns] and [columns, rows] of `dtype`.
    """
    (rows, columns), n = x.shape, launch.buffers
    vectors = dict(row=plgpu.SMEM((n, launch.rows), f32), gain=plgpu.SMEM((n, launch.columns), f32))
    scratch = dict(
        x=_tile((n, launch.rows, launch.columns), x.dtype),
        q=_tile((launch.rows, launch.columns), dtype),
        q_transposed=_tile((launch.columns, launch.rows), dtype),
        full=plgpu.Barrier(num_arrivals=1 + len(factors), num_barriers=n),
    )
    operands = scale[None], x, *factors
    out = plgpu.kernel(
        functools.partial(_kernel, launch, rows // launch.rows, columns // launch.columns),
        out_type=tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((rows, columns), (columns, rows))),
        scratch_types=scratch | (vectors if factors else {}),
        grid=(launch.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="quantize_both_ways",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*operands)
    return tuple(functools.reduce(varying_as, operands, a) for a in out)


def _kernel(launch: TileLaunch, tiles_down: int, tiles_across: int, *refs, **own):
    scale, x, *factors, q, q_transposed = refs
    r, n = Refs(**own), launch.buffers
    count, nth = pieces_here(launch.ctas, tiles_down * tiles_across)

    def here(i):
        down, across = place(nth(i), jnp.int32(tiles_down), tiles_across, launch.neighbors)
        return (
            pl.ds(pl.multiple_of(down * launch.rows, launch.rows), launch.rows),
            pl.ds(pl.multiple_of(across * launch.columns, launch.columns), launch.columns),
        )

    def load(i):
        rows, columns = here(i)
        slot = mod(i, n)
        full = r.full.at[slot]
        plgpu.copy_gmem_to_smem(x.at[rows, columns], r.x.at[slot], full)
        if factors:
            plgpu.copy_gmem_to_smem(factors[0].at[rows], r.row.at[slot], full)
            plgpu.copy_gmem_to_smem(factors[1].at[columns], r.gain.at[slot], full)

    def tile(i, _):
        slot = mod(i, n)
        plgpu.barrier_wait(r.full.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _round(r, slot, scale[0], bool(factors))
        plgpu.commit_smem()
        rows, columns = here(i)
        plgpu.copy_smem_to_gmem(r.q, q.at[rows, columns])
        plgpu.copy_smem_to_gmem(r.q_transposed, q_transposed.at[columns, rows])
        pl.when(i + n < count)(lambda: load(i + n))

    for first in range(n):
        pl.when(first < count)(functools.partial(load, jnp.int32(first)))
    lax.fori_loop(0, count, tile, None)
    plgpu.wait_smem_to_gmem(0)


def _round(r: Refs, slot, scale, scaled: bool) -> None:
    """Round a tile in shared memory by rows and by columns, `M` of them at a time."""
    views = (r.x.at[slot], r.q, BY_ROWS), (transposed(r.x.at[slot]), r.q_transposed, BY_COLUMNS)
    for axis, (ref, out, layout) in enumerate(views):
        for first in range(0, ref.shape[0], M):
            these = pl.ds(first, M)
            values = plgpu.load(ref.at[these], layout=layout).astype(f32)
            if scaled:
                # In the order of a norm's own arithmetic.
                for vector, along in (r.row, axis), (r.gain, 1 - axis):
                    part = vector.at[slot, these] if along == 0 else vector.at[slot]
                    values = values * _spread(part, values.shape, along, layout)
            out[these] = quantize(values, scale, out.dtype)


def _tile(shape, dtype):
    return smem(shape, dtype, min(128, shape[-1] * jnp.dtype(dtype).itemsize))


def _spread(vector, shape, axis: int, layout):
    values = plgpu.load(vector, layout=layout.reduce(1 - axis))
    return plgpu.layout_cast(spread(values, shape, axis), layout)
