"""A matrix rounded to 8 bits, and the same transposed: one pass over memory.

A gradient is multiplied along both of its dims, and Hopper's tensor cores read 8-bit operands only
with the summed dim contiguous in memory: both copies are needed. XLA writes them in one pass too,
but with bytes scattered and the rounding in software: 463 us for 16,384 x 14,336 on an H200, and
856 us within a step, where the memory's bandwidth allows 224. This kernel takes 267.

A norm's output it rounds from the norm's input, so that nobody writes or reads it in 16 bits:
124 us from the input to the 8 bits of 16,384 x 4,096, with what both scales take, in place of 184.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.float8.quantize import quantize
from jaxpar.kernels.norm import Normed
from jaxpar.kernels.platform import Platform

#: Rows and columns of a tile, and the warps that work on it: the fastest of those measured.
TILE, WARPS = 128, 8


def quantize_both_ways(
    x: jax.Array | Normed, scale: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """`quantize(x, scale, dtype)`, and its transpose: the same bits on every platform.

    A Triton kernel on NVIDIA GPUs that know the dtypes (Ada, Hopper) when both sizes are multiples
    of `TILE`, else left to XLA.

    Args:     x: [rows, columns], or a norm's output, unwritten, which is rounded from float32
              alone. scale: float32 scalar, a power of two.
    Returns:  [rows, columns] and [columns, rows] of `dtype`.
    """
    whole_tiles = not any(n % TILE for n in x.shape)
    by = _by_kernel if whole_tiles and _kernel_runs_on(Platform.here()) else _by_xla
    return by(x, scale, dtype)


def _kernel_runs_on(platform: Platform) -> bool:
    return platform.name == "gpu" and float(platform.compute_capability) >= 8.9


def _by_xla(x, scale, dtype):
    q = quantize(x.unrounded() if isinstance(x, Normed) else x, scale, dtype)
    return q, q.T


@functools.partial(jax.jit, static_argnums=(2, 3))
def _by_kernel(x, scale, dtype, interpret=False):
    # A jit, since JAX keeps a lone pallas_call in a backward that reads nothing of it, and with it
    # what it reads: 22 GiB of bfloat16 activations for 8B.
    rows, columns = x.shape
    tile = pl.BlockSpec((TILE, TILE), lambda i, j: (i, j))
    kernel: Callable[..., None] = _kernel
    operands, specs = [x], [tile]
    if isinstance(x, Normed):
        of_row, of_column = (pl.BlockSpec((TILE,), lambda *at, d=d: (at[d],)) for d in (0, 1))
        gain = x.gain.astype(jnp.float32)
        kernel, operands = _normed_kernel, [x.x, x.scale.reshape(rows), gain]
        specs = [tile, of_row, of_column]
    varying = jax.typeof(operands[0]).manual_axis_type
    out = lambda *shape: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # noqa: E731
    return pl.pallas_call(
        kernel,
        grid=(rows // TILE, columns // TILE),
        in_specs=[pl.BlockSpec((1,), lambda i, j: (0,)), *specs],
        out_specs=[
            pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
            pl.BlockSpec((TILE, TILE), lambda i, j: (j, i)),
        ],
        out_shape=[out(rows, columns), out(columns, rows)],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="quantize_both_ways",
        interpret=interpret,
    )(scale[None], *operands)


def _kernel(scale_ref, x_ref, q_ref, transposed_ref):
    _write(x_ref[...], scale_ref, q_ref, transposed_ref)


def _normed_kernel(scale_ref, x_ref, row_ref, gain_ref, q_ref, transposed_ref):
    normed = x_ref[...].astype(jnp.float32) * row_ref[...][:, None] * gain_ref[...][None]
    _write(normed, scale_ref, q_ref, transposed_ref)


def _write(x, scale_ref, q_ref, transposed_ref):
    q = quantize(x, scale_ref[0], q_ref.dtype)
    q_ref[...] = q
    transposed_ref[...] = q.T
