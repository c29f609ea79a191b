"""Rows in 8 bits, with a scale each, rounded by the passes that write them.

A warpgroup holds a row in registers, finds its largest magnitude, and rounds it: no pass reads what
another one wrote.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.kernels.float8.quantize import SMALLEST
from jaxpar.kernels.grouped_matmul.hopper.each_row import COMPUTING, COPYING, each_row, sigmoid
from jaxpar.kernels.grouped_matmul.hopper.rows import of_part
from jaxpar.kernels.grouped_matmul.tiles import Tiles

#: Bits of a float32's mantissa, and the bias of its exponent.
_MANTISSA, _BIAS = 23, 127

f32, i32 = jnp.float32, jnp.int32


def rows_taken_in_float8(
    x: tuple[jax.Array, ...],
    token: jax.Array,
    tiles: Tiles,
    dtype,
    *,
    keep: bool,
    ctas: int = COPYING,
) -> tuple[jax.Array, ...]:
    """Copy the token of each row, in 8 bits, and with `keep` also in x's dtype.

    Args:     x: [T, D] in equal parts.
    Returns:  (8 bits [R, D], largest magnitudes float32 [R]), and with `keep` [R, D].
    """
    R, (_, D) = len(token), x[0].shape

    def row(r, *refs):
        x, (token, q, top, *kept) = refs[:parts], refs[parts:]

        def copy(values):
            for out in kept:
                out[r] = values
            q[r], top[r] = _rounded(dtype, values.astype(f32))

        of_part(x, token[r], copy)

    parts, kept = len(x), [jax.ShapeDtypeStruct((R, D), x[0].dtype)] * keep
    return each_row(row, tiles, ctas, _in_8_bits(R, D, dtype) + kept, *x, token)


def swiglu_in_float8(
    gate, up, scale, tiles: Tiles, dtype, ctas: int = COMPUTING
) -> tuple[jax.Array, ...]:
    """Compute silu(gate) * up * scale in 8 bits.

    Returns:  (8 bits [R, F], largest magnitudes float32 [R]).
    """

    def row(r, gate, up, scale, q, top):
        g, u = gate[r].astype(f32), up[r].astype(f32)
        q[r], top[r] = _rounded(dtype, g * sigmoid(g) * u * scale[r])

    return each_row(
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
        s_g = sigmoid(g)
        act = g * s_g
        h, ds = act * u, d * s
        dg, du = ds * u * (s_g + act * (1.0 - s_g)), ds * act
        for out, value in ((hidden, h * s), (d_gate, dg), (d_up, du)):
            out[r] = value.astype(out.dtype)
        d_scale[r] = jnp.sum(h * d)
        q_gate[r], q_up[r], top[r] = _rounded(dtype, dg, du)

    q, top = _in_8_bits(R, F, dtype)
    made = [wide, wide, wide, top, q, q, top]
    return each_row(row, tiles, ctas, made, gate, up, d_hidden, scale)


def _in_8_bits(R: int, width: int, dtype) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((R, width), dtype), jax.ShapeDtypeStruct((R,), f32)]


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
