"""SwiGLU and its gradient for GPUs since Hopper (Mosaic GPU): a warpgroup for a part of a row.

The numbers go from memory to registers and back. `kernels/swiglu.py` has the formulas.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.hopper.mma import mod, varying_as
from jaxpar.kernels.grouped_matmul.hopper.pipeline import div

#: Columns of a warpgroup if F is a multiple: eight per thread, 16 bytes, in each array.
COLUMNS = 1024

#: Threads of a warpgroup, and so the least columns.
WARPGROUP = 128

f32 = jnp.float32


def forward(
    formula: Callable[..., Any], gate_up, scale, *, with_amax: bool, columns: int = COLUMNS
) -> tuple[jax.Array, ...]:
    """Compute formula(gate, up) of rows [gate, up], both multiplied by their row's scale.

    Args:     formula: on float32 arrays of one shape. gate_up: [N, 2 F], F a multiple of
              `WARPGROUP`. scale: float32 [N], or None.
    Returns:  [N, F], and with `with_amax` the largest magnitudes of its parts, float32.
    """
    F = gate_up.shape[1] // 2

    def part(row, column, columns, scale, gate_up, out):
        halves = (_load(gate_up, row, n * F + column, columns) for n in range(2))
        y = formula(*(_scaled(a, scale) for a in halves)).astype(out.dtype)
        out[row, pl.ds(column, columns)] = y
        return _magnitudes(y)

    made = jax.ShapeDtypeStruct((len(gate_up), F), gate_up.dtype)
    return _call(part, "swiglu", made, F, with_amax, columns, scale, gate_up)


def backward(
    formula: Callable[..., Any], gate_up, scale, d_y, *, with_amax: bool, columns: int = COLUMNS
) -> tuple[jax.Array, ...]:
    """Compute both results of formula(gate, up, d_y), all multiplied by their row's scale.

    Args:     as `forward`. d_y: [N, F].
    Returns:  [N, 2 F], and with `with_amax` the largest magnitudes of its parts, float32.
    """
    F = gate_up.shape[1] // 2

    def part(row, column, columns, scale, gate_up, d_y, out):
        halves = (_load(gate_up, row, n * F + column, columns) for n in range(2))
        given = (*halves, _load(d_y, row, column, columns))
        made = [d.astype(out.dtype) for d in formula(*(_scaled(a, scale) for a in given))]
        for n, d in enumerate(made):
            out[row, pl.ds(n * F + column, columns)] = d
        return jnp.maximum(*map(_magnitudes, made))

    made = jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype)
    return _call(part, "swiglu_backward", made, F, with_amax, columns, scale, gate_up, d_y)


def _call(part, name: str, made, F: int, with_amax: bool, columns: int, scale, *operands):
    """Run `part` for all parts of all rows. Neighboring parts are in neighboring CTAs."""
    columns = math.gcd(F, columns)
    N, across = len(operands[0]), F // columns
    scales = () if scale is None else (scale,)

    def kernel(*refs):
        of_row, refs = refs[: len(scales)], refs[len(scales) :]
        refs, largest = (refs[:-1], refs[-1]) if with_amax else (refs, None)
        cta = lax.axis_index("cta")
        row = div(cta, across)
        column = pl.multiple_of(mod(cta, across) * columns, columns)
        magnitudes = part(row, column, columns, of_row[0][row] if of_row else None, *refs)
        if largest is not None:
            largest[cta] = jnp.max(magnitudes)

    out = plgpu.kernel(
        kernel,
        out_type=(made, *[jax.ShapeDtypeStruct((N * across,), f32)] * with_amax),
        grid=(N * across,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*scales, *operands)
    return tuple(functools.reduce(varying_as, (*scales, *operands), a) for a in out)


def _load(ref, row, column, columns: int):
    vector = min(16 // jnp.dtype(ref.dtype).itemsize, columns // WARPGROUP)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)
    return plgpu.load(ref.at[row, pl.ds(column, columns)], layout=layout).astype(f32)


def _scaled(x, scale):
    return x if scale is None else x * scale


def _magnitudes(x):
    return jnp.abs(x.astype(f32))
