"""SwiGLU of gate and up that lie side by side, and its gradient, each one pass over memory.

Their rows may be yet to be scaled (`norm.Unscaled`). In a step on an H200, forward and backward of
32,768 rows of 2 x 8,192 take the kernels 367 and 646 us; XLA's passes 406 and 631 without a scale,
451 and 679 with one.

Source:   Shazeer 2020 (2002.05202), equation 5.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.platform import Platform

#: Columns of a program, of one row, and the warps that work on them, forward and backward: among
#: the fastest of those measured, and the columns divide what is common divided over `tensor`.
COLUMNS, WARPS = 1024, (4, 8)

LOG2_E = 1.4426950408889634


@jax.custom_vjp
def swiglu(gate_up: jax.Array, scale: jax.Array | None) -> jax.Array:
    """silu(s gate) * s up, of rows [gate, up].

    Args:     gate_up: [..., 2 F]. scale: float32 [..., 1], s of each row, without a gradient; None
              for 1.
    Returns:  [..., F], the same dtype.

    Both directions are Triton kernels on NVIDIA GPUs since Ampere, for bfloat16 and an F that is a
    multiple of `COLUMNS`; else they are left to XLA.
    """
    by = forward_by_kernel if _kernels_run(gate_up) else forward_by_xla
    return by(gate_up, scale)


def _forward(gate_up, scale):
    return swiglu(gate_up, scale), (gate_up, scale)


def _backward(saved, d_y):
    gate_up, scale = saved
    if _kernels_run(gate_up):
        return backward_by_kernel(gate_up, scale, d_y), None
    # Once, for both matmuls that read it: XLA would have each put it together as it reads.
    return lax.optimization_barrier(backward_by_xla(gate_up, scale, d_y)), None


swiglu.defvjp(_forward, _backward)


def _kernels_run(gate_up: jax.Array) -> bool:
    here, F = Platform.here(), gate_up.shape[-1] // 2
    on = here.name == "gpu" and float(here.compute_capability) >= 8.0
    return on and gate_up.dtype == jnp.bfloat16 and F % COLUMNS == 0


def forward_by_xla(gate_up, scale):
    """`swiglu`."""
    gate, up = jnp.split(_scaled(gate_up, scale), 2, axis=-1)
    return _product(gate, up).astype(gate_up.dtype)


def backward_by_xla(gate_up, scale, d_y):
    """The gradient of gate_up, written side by side."""
    gate, up = jnp.split(_scaled(gate_up, scale), 2, axis=-1)
    halves = _gradients(gate, up, _scaled(d_y, scale))
    return jnp.concatenate(halves, axis=-1).astype(gate_up.dtype)


def _scaled(x, scale):
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale


def _product(gate, up):
    return gate * up / (1 + jnp.exp2(-LOG2_E * gate))


def _gradients(gate, up, d_y):
    share = 1 / (1 + jnp.exp2(-LOG2_E * gate))
    return d_y * up * share * (1 + gate * (1 - share)), d_y * gate * share


@functools.partial(jax.jit, static_argnames=("columns", "warps", "interpret"))
def forward_by_kernel(gate_up, scale, *, columns=COLUMNS, warps=WARPS[0], interpret=False):
    """`swiglu`. A jit, as in `norm.by_kernel`."""

    def kernel(halves_ref, scale_ref, out_ref):
        gate, up = (_scaled(halves_ref[i], scale_ref[0]) for i in range(2))
        out_ref[...] = _product(gate, up).astype(out_ref.dtype)

    row, halves, of_row = _blocks(columns)
    halves_N2F, scale_N = _by_row(gate_up, scale)
    N, _, F = halves_N2F.shape
    run = _call(kernel, (N, F), row, [halves, of_row], halves_N2F, columns, warps, interpret)
    return run(halves_N2F, scale_N).reshape(*gate_up.shape[:-1], F)


@functools.partial(jax.jit, static_argnames=("columns", "warps", "interpret"))
def backward_by_kernel(gate_up, scale, d_y, *, columns=COLUMNS, warps=WARPS[1], interpret=False):
    """`backward_by_xla`."""

    def kernel(halves_ref, scale_ref, d_y_ref, out_ref):
        gate, up = (_scaled(halves_ref[i], scale_ref[0]) for i in range(2))
        for i, d in enumerate(_gradients(gate, up, _scaled(d_y_ref[...], scale_ref[0]))):
            out_ref[i] = d.astype(out_ref.dtype)

    row, halves, of_row = _blocks(columns)
    halves_N2F, scale_N = _by_row(gate_up, scale)
    N, _, F = halves_N2F.shape
    given = [halves, of_row, row]
    run = _call(kernel, (N, 2, F), halves, given, halves_N2F, columns, warps, interpret)
    return run(halves_N2F, scale_N, d_y.reshape(N, F)).reshape(gate_up.shape)


def _blocks(columns: int):
    """Of rows [N, F], of both halves [N, 2, F], of a number for each row [N]. A row's columns are
    neighbours in the grid: what runs side by side reads and writes side by side."""
    row = pl.BlockSpec((None, columns), lambda j, i: (i, j))
    halves = pl.BlockSpec((None, 2, columns), lambda j, i: (i, 0, j))
    return row, halves, pl.BlockSpec((1,), lambda j, i: (i,))


def _call(kernel, shape, out_spec, in_specs, like, columns, warps, interpret):
    varying = jax.typeof(like).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=(shape[-1] // columns, shape[0]),
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(shape, like.dtype, manual_axis_type=varying),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="swiglu" if len(shape) == 2 else "swiglu_backward",
        interpret=interpret,
    )


def _by_row(gate_up, scale):
    """[N, 2, F], and float32 [N]."""
    halves_N2F = gate_up.reshape(-1, 2, gate_up.shape[-1] // 2)
    if scale is None:
        scale = jnp.ones_like(halves_N2F[:, 0, 0], jnp.float32)
    return halves_N2F, scale.reshape(-1)
