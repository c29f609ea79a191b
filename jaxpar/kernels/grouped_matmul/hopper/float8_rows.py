"""Rows in 8 bits, with a scale each, rounded by the passes that write them.

A warpgroup holds a row in registers, finds its largest magnitude, and rounds it: no pass reads what
another one wrote. A CTA has a single warpgroup, since Mosaic's sum or maximum of a row uses memory
that all warpgroups of a CTA share.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.kernels.attention.hopper.mma import compiler, varying_as
from jaxpar.kernels.attention.order import MULTIPROCESSORS
from jaxpar.kernels.float8.quantize import SMALLEST
from jaxpar.kernels.grouped_matmul.hopper.pipeline import ROWS, div
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: CTAs of a kernel: as many as fit on the multiprocessors, with the registers of a row's arrays.
COPYING, COMPUTING = 16 * MULTIPROCESSORS, 8 * MULTIPROCESSORS

#: Bits of a float32's mantissa, and the bias of its exponent.
_MANTISSA, _BIAS = 23, 127

f32, i32 = jnp.float32, jnp.int32


def rows_taken_in_float8(
    x: jax.Array, token: jax.Array, tiles: Tiles, dtype, *, keep: bool, ctas: int = COPYING
) -> tuple[jax.Array, ...]:
    """Copy the token of each row, in 8 bits, and with `keep` also in x's dtype.

    Returns:  (8 bits [R, D], largest magnitudes float32 [R]), and with `keep` [R, D].
    """
    R, D = len(token), x.shape[1]

    def row(r, x, token, q, top, *kept):
        values = x[token[r]]
        for out in kept:
            out[r] = values
        q[r], top[r] = _rounded(dtype, values.astype(f32))

    kept = [jax.ShapeDtypeStruct((R, D), x.dtype)] * keep
    return _each_row(row, tiles, ctas, _in_8_bits(R, D, dtype) + kept, x, token)


def swiglu_in_float8(
    gate, up, scale, tiles: Tiles, dtype, ctas: int = COMPUTING
) -> tuple[jax.Array, ...]:
    """Compute silu(gate) * up * scale in 8 bits.

    Returns:  (8 bits [R, F], largest magnitudes float32 [R]).
    """

    def row(r, gate, up, scale, q, top):
        g, u = gate[r].astype(f32), up[r].astype(f32)
        q[r], top[r] = _rounded(dtype, g * _sigmoid(g) * u * scale[r])

    return _each_row(
        row, tiles, ctas, _in_8_bits(gate.shape[0], gate.shape[1], dtype), gate, up, scale
    )


def swiglu_backward_in_float8(
    gate, up, d_hidden, scale, tiles: Tiles, dtype, ctas: int = COMPUTING
) -> tuple[jax.Array, ...]:
    """Compute `api.glu_backward` of SwiGLU, and both gradients also in 8 bits, with a common scale.

    Returns:  (hidden, gradient of gate, gradient of up: [R, F]; of scale: float32 [R]; the two
              gradients in 8 bits [R, F]; their largest magnitudes, float32 [R]).
    """
    (R, F), wide = gate.shape, jax.ShapeDtypeStruct(gate.shape, gate.dtype)

    def row(r, gate, up, d_hidden, scale, hidden, d_gate, d_up, d_scale, q_gate, q_up, top):
        g, u, d, s = *(a[r].astype(f32) for a in (gate, up, d_hidden)), scale[r]
        sigmoid = _sigmoid(g)
        act = g * sigmoid
        h, ds = act * u, d * s
        dg, du = ds * u * (sigmoid + act * (1.0 - sigmoid)), ds * act
        for out, value in ((hidden, h * s), (d_gate, dg), (d_up, du)):
            out[r] = value.astype(out.dtype)
        d_scale[r] = jnp.sum(h * d)
        q_gate[r], q_up[r], top[r] = _rounded(dtype, dg, du)

    q, top = _in_8_bits(R, F, dtype)
    made = [wide, wide, wide, top, q, q, top]
    return _each_row(row, tiles, ctas, made, gate, up, d_hidden, scale)


def _in_8_bits(R: int, width: int, dtype) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((R, width), dtype), jax.ShapeDtypeStruct((R,), f32)]


def _each_row(row, tiles: Tiles, ctas: int, out_type: list, *operands) -> tuple[jax.Array, ...]:
    """Call row(r, *operands, *results) for each row r in use, and give the results their type."""

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


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _rounded(dtype, *rows):
    """Round rows of numbers with a common scale, as `quantize.quantize` and `power_of_two_scale`.

    Returns:  the rows in `dtype`, and the largest magnitude: a scalar.
    """
    tops = [jnp.max(jnp.abs(row)) for row in rows]
    top = functools.reduce(jnp.maximum, tops)
    # Bits of scalars have no lowering, so every element has the scale.
    each = lax.broadcast_in_dim(top, rows[0].shape, ())
    # Exponents by integers: a division is approximate here, and the scale is computed again.
    bits = lax.bitcast_convert_type(jnp.maximum(each, SMALLEST), i32)
    steps = (_bits(jnp.finfo(dtype).max) - bits) >> _MANTISSA
    power = lax.bitcast_convert_type((steps + _BIAS) << _MANTISSA, f32)
    scale = jnp.where(each < jnp.inf, power, jnp.nan)
    return *((row * scale).astype(dtype) for row in rows), top


def _bits(x) -> int:
    return int(np.float32(x).view(np.int32))
