"""Rows times the matrix of their expert: forward, and back to the input."""

import functools

import jax
import jax.experimental.pallas as pl
from jax import lax

from jaxpar.kernels.attention.refs import Refs
from jaxpar.kernels.grouped_matmul.hopper import pipeline
from jaxpar.kernels.grouped_matmul.hopper.pipeline import CONSUMERS, DEFAULT, ROWS, STEP, Launch
from jaxpar.kernels.grouped_matmul.tiles import Tiles


def grouped_matmul(
    xs, ws, tiles: Tiles, *, transpose: bool, expert_dim: int, launch: Launch = DEFAULT
) -> jax.Array:
    """`api.grouped_matmul` for bfloat16 or float16, widths of `capability.HOPPER`, tiles of 128."""
    (R, K), dtype = xs[0].shape, xs[0].dtype
    first, second = (n for dim, n in enumerate(ws[0].shape) if dim != expert_dim)
    N = first if transpose else second
    width = pipeline.width_of(N)
    of_w = (width, STEP) if transpose else (STEP, width)
    return pipeline.call(
        functools.partial(_kernel, len(xs), K, N, width, transpose, expert_dim, launch),
        jax.ShapeDtypeStruct((R, N), dtype),
        pipeline.scratch((ROWS, STEP), of_w, width, dtype, dtype, launch.interpret),
        launch.ctas,
        *(*xs, *ws, tiles.expert, tiles.used),
    )


def _kernel(
    terms: int, K: int, N: int, width: int, transpose: bool, expert_dim: int, launch, *refs, **own
):
    xs, ws, (experts, used, out) = refs[:terms], refs[terms : 2 * terms], refs[2 * terms :]
    r, column_tiles, per_term = Refs(**own), N // width, K // STEP
    steps, row_tiles = per_term * terms, used[0]
    count, nth = pipeline.pieces_here(launch.ctas, row_tiles * column_tiles)
    where = lambda i: pipeline.place(nth(i), row_tiles, column_tiles)  # noqa: E731

    def producer():
        def tile(i, _):
            m, n = where(i)
            expert, rows, columns = experts[m], pl.ds(m * ROWS, ROWS), pl.ds(n * width, width)

            def step(k, _):
                for term, (x, w) in enumerate(zip(xs, ws, strict=True)):

                    def load(x=x, w=w, term=term):
                        summed = pl.ds((k - term * per_term) * STEP, STEP)
                        cut = (columns, summed) if transpose else (summed, columns)
                        of_w = (
                            w.at[expert, *cut] if expert_dim == 0 else w.at[cut[0], expert, cut[1]]
                        )
                        pipeline.load(r, i * steps + k, x.at[rows, summed], of_w)

                    pl.when(pipeline.div(k, per_term) == term)(load) if terms > 1 else load()

            lax.fori_loop(0, steps, step, None)

        lax.fori_loop(0, count, tile, None)
        pipeline.drain(r, count * steps, launch)

    def consumer(wg):
        half = ROWS // CONSUMERS
        mine = pl.ds(pl.multiple_of(wg * half, half), half)

        def operands(slot):
            b = r.b.at[slot]
            return r.a.at[slot, mine], b.transpose((1, 0)) if transpose else b

        def tile(i, _):
            m, n = where(i)
            rows = pl.ds(m * ROWS + wg * half, half)

            def store(acc):
                columns = r.pieces.shape[-1]
                at = lambda j: out.at[rows, pl.ds(n * width + j, columns)]  # noqa: E731
                pipeline.store(r, wg, acc, at)

            pipeline.accumulate(r, wg, i * steps, steps, operands, store, width, launch)

        lax.fori_loop(0, count, tile, None)

    pipeline.roles(producer, consumer)
