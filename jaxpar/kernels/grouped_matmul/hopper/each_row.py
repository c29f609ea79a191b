"""Passes over the rows in use, with a warpgroup for each row."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import compiler, varying_as
from jaxpar.kernels.attention.order import MULTIPROCESSORS
from jaxpar.kernels.grouped_matmul.hopper.pipeline import ROWS, div
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: CTAs of a pass: as many as fit on the multiprocessors, with the registers of a row's arrays.
COPYING, COMPUTING = 16 * MULTIPROCESSORS, 8 * MULTIPROCESSORS


def each_row(
    row: Callable[..., None],
    tiles: Tiles,
    ctas: int,
    out_type: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
) -> tuple[jax.Array, ...]:
    """Call row(r, *operands, *results) for each row r in use, and return the results.

    A CTA has a single warpgroup, since Mosaic's sum or maximum of a row uses memory that all
    warpgroups of a CTA share.
    """

    def kernel(used, *refs):
        cta = lax.axis_index("cta")
        each = lambda i, _: row(cta + i * ctas, *refs)  # noqa: E731
        lax.fori_loop(0, div(used[0] * ROWS - cta + (ctas - 1), ctas), each, None)

    out = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=compiler(),
    )(tiles.used, *operands)
    return tuple(functools.reduce(varying_as, operands, a) for a in out)


def sigmoid(x):
    """Compute the sigmoid by operations that Mosaic's compiler supports."""
    return 1.0 / (1.0 + jnp.exp(-x))
