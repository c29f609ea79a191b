"""The gradient of each expert's matrix: x^T y over the expert's rows.

The sum is over rows, and an expert's rows begin at a tile, so that no step is masked.

A tile of the result takes time in proportion to its expert's rows, and a router may give one expert
ten times the mean. The tiles of the fullest expert therefore come first, and CTAs are not
persistent: a multiprocessor that is done starts the next one.
"""

import functools
from types import SimpleNamespace as Refs

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.grouped_matmul.hopper import pipeline
from jaxpar.kernels.grouped_matmul.hopper.pipeline import CONSUMERS, ROWS, STEP, Launch
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: Tiles of the result that a CTA computes.
TILES_PER_CTA = 4


def grouped_outer(
    x, y, tiles: Tiles, *, expert_dim: int, dtype, launch: Launch | None = None
) -> jax.Array:
    """`api.grouped_outer` for bfloat16 or float16, widths of `capability.HOPPER`.

    M and N need not be multiples of a tile's: past their ends, TMA reads zeros and writes nothing.
    (The interpreter needs full tiles.)
    """
    M, N, E = x.shape[1], y.shape[1], len(tiles.starts) - 1
    width = pipeline.width_of(N)
    shape = (E, M, N) if expert_dim == 0 else (M, E, N)
    if launch is None:
        launch = Launch(ctas=-(-E * _row_tiles(M) * pipeline.tiles_across(N) // TILES_PER_CTA))
    fullest_first = jnp.argsort(tiles.starts[:-1] - tiles.starts[1:])
    return pipeline.call(
        functools.partial(_kernel, E, M, N, width, expert_dim, launch),
        jax.ShapeDtypeStruct(shape, dtype),
        pipeline.scratch(
            (STEP, ROWS), (STEP, width), width, [x.dtype] * 2, dtype, launch.interpret
        ),
        launch.ctas,
        *(x, y, tiles.starts, fullest_first),
    )


def _row_tiles(M: int) -> int:
    return -(-M // ROWS)


def _kernel(E: int, M: int, N: int, width: int, expert_dim: int, launch, *refs, **own):
    x, y, starts, fullest_first, out = refs
    r, row_tiles, column_tiles = Refs(**own), _row_tiles(M), pipeline.tiles_across(N)
    per_expert = row_tiles * column_tiles
    count, nth = pipeline.pieces_here(launch.ctas, jnp.int32(E * per_expert))

    def where(i):
        nth_fullest = pipeline.div(nth(i), per_expert)
        of_expert = nth(i) - nth_fullest * per_expert
        m, n = pipeline.place(of_expert, jnp.int32(row_tiles), column_tiles)
        expert = fullest_first[nth_fullest]
        first = starts[expert]
        return expert, m, n, first, pipeline.div(starts[expert + 1] - first, STEP)

    def producer():
        def tile(i, loaded):
            _, m, n, first, steps = where(i)
            columns = pl.ds(m * ROWS, ROWS), pl.ds(n * width, width)

            def step(k, _):
                rows = pl.ds(pl.multiple_of(first + k * STEP, STEP), STEP)
                pipeline.load(r, loaded + k, x.at[rows, columns[0]], y.at[rows, columns[1]])

            lax.fori_loop(0, steps, step, None)
            return loaded + steps

        pipeline.drain(r, lax.fori_loop(0, count, tile, jnp.int32(0)), launch)

    def consumer(wg):
        half = ROWS // CONSUMERS
        mine = pl.ds(pl.multiple_of(wg * half, half), half)
        operands = lambda slot: (r.a.at[slot, :, mine].transpose((1, 0)), r.b.at[slot])  # noqa: E731

        def tile(i, taken):
            expert, m, n, _, steps = where(i)
            rows = pl.ds(m * ROWS + wg * half, half)

            def store(acc):
                def at(j):
                    columns = pl.ds(n * width + j, r.pieces.shape[-1])
                    return (
                        out.at[expert, rows, columns]
                        if expert_dim == 0
                        else out.at[rows, expert, columns]
                    )

                pipeline.store(r, wg, acc, at)

            pipeline.accumulate(r, wg, taken, steps, operands, store, width, launch)
            return taken + steps

        lax.fori_loop(0, count, tile, jnp.int32(0))

    pipeline.roles(producer, consumer)
