"""Rows times the matrix of their expert: forward, and back to the input."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace as Refs

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jaxpar.kernels.attention.hopper.mma import ROW
from jaxpar.kernels.grouped_matmul.hopper import pipeline
from jaxpar.kernels.grouped_matmul.hopper.pipeline import CONSUMERS, DEFAULT, ROWS, Launch
from jaxpar.kernels.grouped_matmul.tiles import Tiles


def grouped_matmul(
    xs, ws, tiles: Tiles, *, transpose: bool, expert_dim: int, launch: Launch = DEFAULT
) -> jax.Array:
    """`api.grouped_matmul` for bfloat16 or float16, widths of `capability.HOPPER`, tiles of 128."""
    return _call(xs, ws, (), tiles, transpose, expert_dim, xs[0].dtype, launch)


def scaled_matmul(
    xs, ws, scale, tiles: Tiles, *, expert_dim: int, dtype, launch: Launch = DEFAULT
) -> jax.Array:
    """`float8.scaled_matmul` for e4m3 and e5m2, K a multiple of 128, tiles of 128.

    Steps are twice as wide as with 16 bits. Sums are accumulated by the tensor cores alone.
    """
    return _call(xs, ws, (scale,), tiles, True, expert_dim, dtype, launch)


@dataclass(frozen=True)
class _Shape:
    """The static parameters of a call: the sum of `terms` products [R, K] x [K, N]."""

    terms: int
    K: int
    N: int
    width: int
    step: int
    transpose: bool
    expert_dim: int


def _call(xs, ws, scales, tiles, transpose: bool, expert_dim: int, dtype, launch: Launch):
    R, K = xs[0].shape
    first, second = (n for dim, n in enumerate(ws[0].shape) if dim != expert_dim)
    N = first if transpose else second
    width, step = pipeline.width_of(N), pipeline.columns_at_a_time(xs[0].dtype)
    shape = _Shape(len(xs), K, N, width, step, transpose, expert_dim)
    of_w, dtypes = (width, step) if transpose else (step, width), (xs[0].dtype, ws[0].dtype)
    return pipeline.call(
        functools.partial(_kernel, shape, launch),
        jax.ShapeDtypeStruct((R, N), dtype),
        pipeline.scratch((ROWS, step), of_w, width, dtypes, dtype, launch.interpret),
        launch.ctas,
        *(*xs, *ws, *scales, tiles.expert, tiles.used),
    )


def _kernel(s: _Shape, launch: Launch, *refs, **own):
    xs, ws = refs[: s.terms], refs[s.terms : 2 * s.terms]
    *scales, experts, used, out = refs[2 * s.terms :]
    r, column_tiles, per_term = Refs(**own), pipeline.tiles_across(s.N), s.K // s.step
    steps, row_tiles = per_term * s.terms, used[0]
    count, nth = pipeline.pieces_here(launch.ctas, row_tiles * column_tiles)
    where = lambda i: pipeline.place(nth(i), row_tiles, column_tiles)  # noqa: E731

    def producer():
        def tile(i, _):
            m, n = where(i)
            expert, rows, columns = experts[m], pl.ds(m * ROWS, ROWS), pl.ds(n * s.width, s.width)

            def step(k, _):
                for term, (x, w) in enumerate(zip(xs, ws, strict=True)):

                    def load(x=x, w=w, term=term):
                        summed = pl.ds((k - term * per_term) * s.step, s.step)
                        cut = (columns, summed) if s.transpose else (summed, columns)
                        at = (expert, *cut) if s.expert_dim == 0 else (cut[0], expert, cut[1])
                        pipeline.load(r, i * steps + k, x.at[rows, summed], w.at[at])

                    pl.when(pipeline.div(k, per_term) == term)(load) if s.terms > 1 else load()

            lax.fori_loop(0, steps, step, None)

        lax.fori_loop(0, count, tile, None)
        pipeline.drain(r, count * steps, launch)

    def consumer(wg):
        half = ROWS // CONSUMERS
        mine = pl.ds(pl.multiple_of(wg * half, half), half)

        def operands(slot):
            b = r.b.at[slot]
            return r.a.at[slot, mine], b.transpose((1, 0)) if s.transpose else b

        def tile(i, _):
            m, n = where(i)
            rows = pl.ds(m * ROWS + wg * half, half)
            # Read before the products, which hide the latency.
            of_rows = [plgpu.load(a.at[rows], layout=ROW, optimized=False) for a in scales]

            def store(acc):
                columns = r.pieces.shape[-1]
                at = lambda j: out.at[rows, pl.ds(n * s.width + j, columns)]  # noqa: E731
                pipeline.store(r, wg, acc, at, *of_rows)

            pipeline.accumulate(r, wg, i * steps, steps, operands, store, s.width, launch)

        lax.fori_loop(0, count, tile, None)

    pipeline.roles(producer, consumer)
