"""SwiGLU of a fused gate-up projection, and its gradient, each in one pass over memory.

The scale of the rows may be deferred (`norm.NormOutput`). In a step on an H200, forward and
backward of 32,768 rows of 2 x 8,192 take 367 and 646 us with the kernels. XLA takes 406 and 631 us
without a scale, 451 and 679 with one.

Source:   Shazeer 2020 (2002.05202), equation 5.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.compiler import compiler_of
from jaxpar.kernels.float8.amax import WithAmax
from jaxpar.kernels.float8.quantize import max_magnitude
from jaxpar.kernels.lazy_import import imported_when_used

hopper = imported_when_used("jaxpar.kernels.hopper.swiglu")

#: Columns of one row per program if F is a multiple, and warps per program in the forward and the
#: backward: among the fastest configurations measured. A program that computes its largest
#: magnitude waits for all its warps, so it has 4 in both directions.
COLUMNS, WARPS = 1024, (4, 8)

#: Minimum columns per program. For other F, programs have the largest power of two that divides F,
#: with the same number of columns per warp. 512 columns are as fast; with 256, the forward takes
#: 445 us and XLA 273 (16,384 rows of 2 x 11,008). A backward that computes the largest magnitude is
#: faster with 256 too, 450 us instead of 589, because XLA reads the result again.
MIN_COLUMNS, MIN_AMAX_COLUMNS = 512, 256

LOG2_E = 1.4426950408889634


def swiglu(gate_up: jax.Array | WithAmax, scale: jax.Array | None) -> jax.Array | WithAmax:
    """Compute silu(s gate) * s up of rows [gate, up]. A `WithAmax` gives a `WithAmax`.

    Args:     scale: as in `swiglu_scaled`. None if gate_up is a `WithAmax`, because float8 matmuls
              do not defer scales.
    """
    if isinstance(gate_up, WithAmax):
        assert scale is None
        return swiglu_with_amax(gate_up)
    return swiglu_scaled(gate_up, scale)


@jax.custom_vjp
def swiglu_scaled(gate_up: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Compute silu(s gate) * s up of rows [gate, up].

    Args:     gate_up: [..., 2 F]. scale: float32 [..., 1], s of each row, without a gradient; None
              means 1.
    Returns:  [..., F], the same dtype.

    Both directions use kernels for bfloat16 and an F that is a multiple of `MIN_COLUMNS`, otherwise
    XLA: those for Triton on NVIDIA GPUs since Ampere, or those for Mosaic GPU since Hopper
    (`kernels/compiler.py`).
    """
    kernels = _kernels(gate_up)
    by = kernels[0] if kernels else forward_by_xla
    return by(gate_up, scale)


def _forward(gate_up, scale):
    return swiglu_scaled(gate_up, scale), (gate_up, scale)


def _backward(saved, d_y):
    gate_up, scale = saved
    if kernels := _kernels(gate_up):
        return kernels[1](gate_up, scale, d_y), None
    # Materialize it once for both matmuls that read it. XLA would repeat the concatenation in each.
    return lax.optimization_barrier(backward_by_xla(gate_up, scale, d_y)), None


swiglu_scaled.defvjp(_forward, _backward)


@jax.custom_vjp
def swiglu_with_amax(gate_up: WithAmax) -> WithAmax:
    """`swiglu` without a scale, where result and gradient are `WithAmax`.

    Args:     gate_up: [..., 2 F]; its largest magnitude is not read.
    Returns:  [..., F], the same dtype.

    Uses the kernels under the conditions of `swiglu_scaled`, and the backward kernel also for
    multiples of `MIN_AMAX_COLUMNS`. XLA's backward needs another pass over its result for the
    largest magnitude.
    """
    values = gate_up.values
    if kernels := _kernels(values):
        return kernels[0](values, None, with_amax=True)
    return _with_amax_by_xla(forward_by_xla(values, None))


def _forward_with_amax(gate_up):
    return swiglu_with_amax(gate_up), gate_up.values


def _backward_with_amax(gate_up, d_y):
    if kernels := _kernels(gate_up, MIN_AMAX_COLUMNS):
        return (kernels[1](gate_up, None, d_y.values, with_amax=True),)
    return (_with_amax_by_xla(backward_by_xla(gate_up, None, d_y.values)),)


swiglu_with_amax.defvjp(_forward_with_amax, _backward_with_amax)


def _with_amax_by_xla(x: jax.Array) -> WithAmax:
    return WithAmax(x, max_magnitude(x))


def _kernels(gate_up: jax.Array, fewest: int = MIN_COLUMNS) -> tuple | None:
    """Return the forward and the backward kernel, or None if XLA compiles both."""
    if gate_up.dtype != jnp.bfloat16 or gate_up.shape[-1] // 2 % fewest:
        return None
    kernels = {
        "triton": (forward_by_triton, backward_by_triton),
        "mosaic": (forward_by_mosaic, backward_by_mosaic),
    }
    return kernels.get(compiler_of(kernel_capability=8.0))


def forward_by_xla(gate_up, scale):
    """`swiglu_scaled`, compiled by XLA."""
    gate, up = jnp.split(_scaled(gate_up, scale), 2, axis=-1)
    return _product(gate, up).astype(gate_up.dtype)


def backward_by_xla(gate_up, scale, d_y):
    """Compute the gradient of gate_up, compiled by XLA."""
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


@functools.partial(jax.jit, static_argnames=("with_amax", "columns"))
def forward_by_mosaic(gate_up, scale, *, with_amax=False, columns=None):
    """`swiglu_scaled` or `swiglu_with_amax` by the kernel for Mosaic GPU."""
    rows, of_rows = gate_up.reshape(-1, gate_up.shape[-1]), _of_rows(scale)
    how = dict(with_amax=with_amax, columns=columns or hopper.COLUMNS)
    made = hopper.forward(_product, rows, of_rows, **how)
    return _whole(made, (*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@functools.partial(jax.jit, static_argnames=("with_amax", "columns"))
def backward_by_mosaic(gate_up, scale, d_y, *, with_amax=False, columns=None):
    """`backward_by_xla` by the kernel for Mosaic GPU, with the largest magnitude if `with_amax`."""
    rows, d_rows = (a.reshape(-1, a.shape[-1]) for a in (gate_up, d_y))
    how = dict(with_amax=with_amax, columns=columns or hopper.COLUMNS)
    return _whole(hopper.backward(_gradients, rows, _of_rows(scale), d_rows, **how), gate_up.shape)


def _of_rows(scale):
    return None if scale is None else scale.reshape(-1)


def _whole(made, shape):
    """Reshape a kernel's result. If it comes with largest magnitudes, return a `WithAmax`."""
    values = made[0].reshape(shape)
    return values if len(made) == 1 else WithAmax(values, jnp.max(made[1]))


_HOW = ("columns", "warps", "interpret", "with_amax")


@functools.partial(jax.jit, static_argnames=_HOW)
def forward_by_triton(gate_up, scale, *, with_amax=False, warps=WARPS[0], **how):
    """`swiglu_scaled` or `swiglu_with_amax` as a kernel. Inside a jit, so that JAX can drop it."""

    def kernel(halves_ref, scale_ref, out_ref, *largest_ref):
        gate, up = (_scaled(halves_ref[i], scale_ref[0]) for i in range(2))
        out_ref[...] = out = _product(gate, up).astype(out_ref.dtype)
        _write_largest(largest_ref, [out])

    N, F = gate_up.size // gate_up.shape[-1], gate_up.shape[-1] // 2
    made = _run(kernel, (N, F), [gate_up, scale], with_amax, warps, **how)
    return _in_shape(made, (*gate_up.shape[:-1], F))


@functools.partial(jax.jit, static_argnames=_HOW)
def backward_by_triton(gate_up, scale, d_y, *, with_amax=False, warps=None, **how):
    """`backward_by_xla` as a kernel, with the largest magnitude if `with_amax`."""

    def kernel(halves_ref, scale_ref, d_y_ref, out_ref, *largest_ref):
        gate, up = (_scaled(halves_ref[i], scale_ref[0]) for i in range(2))
        gradients = _gradients(gate, up, _scaled(d_y_ref[...], scale_ref[0]))
        rounded = [d.astype(out_ref.dtype) for d in gradients]
        for i, d in enumerate(rounded):
            out_ref[i] = d
        _write_largest(largest_ref, rounded)

    N, F = gate_up.size // gate_up.shape[-1], gate_up.shape[-1] // 2
    warps = WARPS[not with_amax] if warps is None else warps
    made = _run(kernel, (N, 2, F), [gate_up, scale, d_y], with_amax, warps, **how)
    return _in_shape(made, gate_up.shape)


def _write_largest(ref, arrays):
    """Write the largest magnitude of a program's rounded results, if requested.

    The maximum is that of the bits as integers, which have the same order; NaN is above infinity.
    """
    if ref:
        magnitudes = [jnp.abs(x.astype(jnp.float32)) for x in arrays]
        bits = [lax.bitcast_convert_type(a, jnp.int32) for a in magnitudes]
        ref[0][0] = jnp.max(functools.reduce(jnp.maximum, bits))


def _in_shape(made, shape):
    """Reshape a kernel's result. If programs wrote largest magnitudes, return a `WithAmax`."""
    if len(made) == 1:
        return made[0].reshape(shape)
    return WithAmax(made[0].reshape(shape), lax.bitcast_convert_type(jnp.max(made[1]), jnp.float32))


def _run(kernel, shape, given, with_amax, warps, *, columns=None, interpret=False):
    """Run a kernel that writes rows [N, F] or both halves [N, 2, F].

    With `with_amax`, each program also writes its largest magnitude.

    Args:     given: gate_up; scale or None; for the backward, d_y.
    """
    gate_up, scale, *rest = given
    N, F = shape[0], shape[-1]
    if columns is None:
        columns = math.gcd(F, COLUMNS)
        warps = max(1, warps * columns // COLUMNS)
    scale_N = jnp.ones_like(gate_up, jnp.float32, shape=N) if scale is None else scale.reshape(N)
    operands = [gate_up.reshape(N, 2, F), scale_N, *(a.reshape(N, F) for a in rest)]
    # Programs of neighboring columns are neighbors in the grid, so they read neighboring memory.
    row = pl.BlockSpec((None, columns), lambda j, i: (i, j))
    halves = pl.BlockSpec((None, 2, columns), lambda j, i: (i, 0, j))
    of_row = pl.BlockSpec((1,), lambda j, i: (i,))
    of_program = [pl.BlockSpec((None, 1), lambda j, i: (j, i))] * with_amax
    grid = (F // columns, N)
    varying = jax.typeof(gate_up).manual_axis_type
    out = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # noqa: E731
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[halves, of_row, *[row] * len(rest)],
        out_specs=[row if len(shape) == 2 else halves, *of_program],
        out_shape=[out(gate_up.dtype, *shape), *[out(jnp.int32, *grid)] * with_amax],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="swiglu" if len(shape) == 2 else "swiglu_backward",
        interpret=interpret,
    )(*operands)
