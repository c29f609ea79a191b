"""Quantization to 8 bits: a tensor times a power of two, rounded to e4m3 or e5m2.

e4m3 has 3 bits of mantissa and a range from 2^-6 to 448. e5m2 has 2 bits and a range from 2^-14 to
57,344. Subnormal numbers add three and two powers of two with fewer bits. The scale moves a
tensor's largest magnitude to the top of the range. Scales are powers of two, so scaling is exact,
both here and where products are scaled back. The only rounding is the one to 8 bits, to nearest. It
does not depend on the scale, except for numbers below about 2^-14 (e4m3) or 2^-29 (e5m2) of the
largest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: The dtype of activations and weights, which need precision.
FORWARD = jnp.float8_e4m3fn

#: The dtype of gradients, which need range.
BACKWARD = jnp.float8_e5m2

#: Lower limit of largest magnitudes, so that the scale of all zeros is finite.
SMALLEST = 2.0**-100

#: Bits of the sign and exponent of a float32.
_EXPONENT = np.uint32(0xFF800000)


def max_magnitude(x: jax.Array, dims: int | tuple[int, ...] | None = None) -> jax.Array:
    """Compute the largest magnitude, float32, over some dims or all. NaN if there is a NaN."""
    return jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)


def power_of_two_scale(max_magnitude: jax.Array, dtype: Any) -> jax.Array:
    """Compute the largest power of two that scales `max_magnitude` into the range of `dtype`.

    Scaled values cannot overflow, so they are not clipped. If `max_magnitude` is non-finite, the
    scale is NaN, and so are all scaled values. The loss is then NaN too, and the update is skipped.

    Args:     max_magnitude: float32, not negative.
    Returns:  float32, the same shape.
    """
    room = float(jnp.finfo(dtype).max) / jnp.maximum(max_magnitude, SMALLEST)
    bits = lax.bitcast_convert_type(room, jnp.uint32) & _EXPONENT
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(max_magnitude), power, jnp.nan)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Round x * scale to nearest in `dtype`.

    Args:     scale: float32 powers of two, with a shape that broadcasts to x's.
    """
    return (x.astype(jnp.float32) * scale).astype(dtype)
