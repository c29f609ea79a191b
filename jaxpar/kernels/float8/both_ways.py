"""Matrices of 8 bits transposed: on being rounded, or as they are. One pass over memory each.

A gradient is multiplied along both of its dims, and Hopper's tensor cores read 8-bit operands only
with the summed dim contiguous in memory: both copies are needed. XLA writes them in one pass too,
but with bytes scattered and the rounding in software: 463 us for 16,384 x 14,336 on an H200, and
856 us within a step, where the memory's bandwidth allows 224. This kernel takes 267. A gathered
weight comes rounded, and is transposed for the output's product.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.float8.quantize import quantize
from jaxpar.kernels.platform import Platform

#: Rows and columns of a tile, and the warps that work on it: the fastest of those measured.
TILE, WARPS = 128, 8


def quantize_both_ways(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`quantize(x, scale, dtype)`, and its transpose: the same bits on every platform.

    A Triton kernel on NVIDIA GPUs that know the dtypes (Ada, Hopper) when both sizes are multiples
    of `TILE`, else left to XLA.

    Args:     x: [rows, columns]. scale: float32 scalar, a power of two.
    Returns:  [rows, columns] and [columns, rows] of `dtype`.
    """
    return (_by_kernel if _kernel_serves(x) else _by_xla)(x, scale, dtype)


def transpose(q: jax.Array) -> jax.Array:
    """`q.T`, laid out in memory as it reads: by the same rules.

    Args:     q: [rows, columns], 8 bits.
    """
    return _transpose_by_kernel(q) if _kernel_serves(q) else q.T


def _kernel_serves(x: jax.Array) -> bool:
    return not any(n % TILE for n in x.shape) and _kernel_runs_on(Platform.here())


def _kernel_runs_on(platform: Platform) -> bool:
    return platform.name == "gpu" and float(platform.compute_capability) >= 8.9


def _by_xla(x, scale, dtype):
    q = quantize(x, scale, dtype)
    return q, q.T


@functools.partial(jax.jit, static_argnums=(2, 3))
def _by_kernel(x, scale, dtype, interpret=False):
    # A jit, since JAX keeps a lone pallas_call in a backward that reads nothing of it, and with it
    # what it reads: 22 GiB of bfloat16 activations for 8B.
    rows, columns = x.shape
    call = _tiled(_kernel, x, interpret, "quantize_both_ways")
    return call(
        in_specs=[pl.BlockSpec((1,), lambda i, j: (0,)), _STRAIGHT],
        out_specs=[_STRAIGHT, _ACROSS],
        out_shape=[_like(x, (rows, columns), dtype), _like(x, (columns, rows), dtype)],
    )(scale[None], x)


@functools.partial(jax.jit, static_argnums=1)
def _transpose_by_kernel(q, interpret=False):
    call = _tiled(_transpose_kernel, q, interpret, "transpose_8_bits")
    out = _like(q, q.shape[::-1], q.dtype)
    return call(in_specs=[_STRAIGHT], out_specs=_ACROSS, out_shape=out)(q)


#: A tile's place in the matrix, and in its transpose.
_STRAIGHT = pl.BlockSpec((TILE, TILE), lambda i, j: (i, j))
_ACROSS = pl.BlockSpec((TILE, TILE), lambda i, j: (j, i))


def _like(x, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _tiled(kernel, x, interpret, name):
    """A `pallas_call` that visits each tile of x once; its specs are still to be given."""
    return functools.partial(
        pl.pallas_call,
        kernel,
        grid=(x.shape[0] // TILE, x.shape[1] // TILE),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name=name,
        interpret=interpret,
    )


def _kernel(scale_ref, x_ref, q_ref, transposed_ref):
    q = quantize(x_ref[...], scale_ref[0], q_ref.dtype)
    q_ref[...] = q
    transposed_ref[...] = q.T


def _transpose_kernel(q_ref, transposed_ref):
    transposed_ref[...] = q_ref[...].T
