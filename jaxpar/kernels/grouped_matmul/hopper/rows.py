"""Rows from tokens, and tokens from rows: a warpgroup for each, which moves only what exists."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import compiler, varying_as
from jaxpar.kernels.attention.order import MULTIPROCESSORS
from jaxpar.kernels.grouped_matmul.hopper.pipeline import div
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: CTAs, and warpgroups of each: as many as fit on the multiprocessors.
CTAS, WARPGROUPS = 4 * MULTIPROCESSORS, 4


def rows_taken(
    x: tuple[jax.Array, ...], token: jax.Array, tiles: Tiles, ctas: int = CTAS
) -> jax.Array:
    """`api.rows_taken` for widths of multiples of 128, and tiles of 128."""
    out = plgpu.kernel(
        functools.partial(_take, len(token) // len(tiles.expert), ctas),
        out_type=jax.ShapeDtypeStruct((len(token), x[0].shape[1]), x[0].dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(*x, token, tiles.used)
    return functools.reduce(varying_as, (*x, token), out)


def of_part(x: Sequence[Any], t: Any, use: Callable[[Any], None]) -> None:
    """Call use(row t of the parts x): of whichever part has it. In a kernel."""
    if len(x) == 1:
        use(x[0][t])
        return
    size = x[0].shape[0]
    for n, part in enumerate(x):
        row = t - n * size
        pl.when((row >= 0) & (row < size))(functools.partial(_use_row, part, row, use))


def _use_row(part: Any, row: Any, use: Callable[[Any], None]) -> None:
    use(part[row])


def _take(tile: int, ctas: int, *refs):
    *x, token, used, out = refs
    step = ctas * WARPGROUPS
    me = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("warpgroup")

    def row(i, _):
        r = me + i * step

        def copy(values):
            out[r] = values

        of_part(x, token[r], copy)

    lax.fori_loop(0, div(used[0] * tile - me + (step - 1), step), row, None)


def rows_added(y: jax.Array, rows: jax.Array, ctas: int = CTAS) -> jax.Array:
    """`api.rows_added` for widths of multiples of 128."""
    (_, D), T = y.shape, len(rows)
    out = plgpu.kernel(
        functools.partial(_kernel, T, D, ctas),
        out_type=jax.ShapeDtypeStruct((T, D), y.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(y, _listed(rows))
    return varying_as(varying_as(out, y), rows)


def _listed(rows: jax.Array) -> jax.Array:
    """Return int32 [T, 1 + k]: how many rows a token has, then these rows, in their order."""
    there = rows >= 0
    order = jnp.argsort(~there, axis=1, stable=True) if rows.shape[1] > 1 else jnp.zeros_like(rows)
    first = jnp.take_along_axis(rows, order, axis=1)
    return jnp.concatenate([jnp.sum(there, axis=1, dtype=jnp.int32)[:, None], first], axis=1)


def _kernel(T: int, D: int, ctas: int, y, listed, out):
    f32, step = jnp.float32, ctas * WARPGROUPS
    me = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("warpgroup")

    def token(i, _):
        t = me + i * step
        add = lambda j, total: total + y[listed[t, 1 + j]].astype(f32)  # noqa: E731
        total = lax.fori_loop(0, listed[t, 0], add, jnp.zeros((D,), f32))
        out[t] = total.astype(out.dtype)

    lax.fori_loop(0, div(T - me + (step - 1), step), token, None)
