"""Numbers of 8 bits: a tensor times a power of two, rounded to e4m3 or e5m2.

e4m3 has 3 bits of mantissa and reaches from 2^-6 to 448, e5m2 has 2 and reaches from 2^-14 to
57,344; below, three and two more powers of two are left with fewer bits. The scale brings a
tensor's largest magnitude to the top of that range. It is a power of two, so that scaling rounds
nothing, here or where a product is scaled back: one rounding is left, to the nearest, and it is
the same whatever the scale, except for numbers below some 2^-14 (e4m3) or 2^-29
(e5m2) of the largest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: Activations and weights, where precision counts.
FORWARD = jnp.float8_e4m3fn

#: Gradients, where range counts.
BACKWARD = jnp.float8_e5m2

#: Largest magnitudes below this are scaled as if they were it: all zeros have a scale too.
_SMALLEST = 2.0**-100

#: Sign and exponent of a float32.
_EXPONENT = np.uint32(0xFF800000)


def max_magnitude(x: jax.Array, dims: int | tuple[int, ...] | None = None) -> jax.Array:
    """Largest magnitude, float32, over some dims or all. NaN where there is one."""
    return jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)


def power_of_two_scale(max_magnitude: jax.Array, dtype: Any) -> jax.Array:
    """The largest power of two that keeps numbers up to `max_magnitude` in the range of `dtype`.

    Nothing scaled by it overflows, so nothing is clipped. Where `max_magnitude` is not finite, the
    scale is NaN, and so is all that it scales: the loss shows it, and the guard skips the update.

    Args:     max_magnitude: float32, not negative.
    Returns:  float32, the same shape.
    """
    room = float(jnp.finfo(dtype).max) / jnp.maximum(max_magnitude, _SMALLEST)
    bits = lax.bitcast_convert_type(room, jnp.uint32) & _EXPONENT
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(max_magnitude), power, jnp.nan)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x * scale, rounded to the nearest number of `dtype`.

    Args:     scale: float32 powers of two, of a shape that broadcasts to x's.
    """
    return (x.astype(jnp.float32) * scale).astype(dtype)
