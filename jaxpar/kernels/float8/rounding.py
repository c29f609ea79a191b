"""Quantization to 8 bits: a tensor times a power of two, rounded to e4m3 or e5m2.

e4m3 has 3 bits of mantissa and a range from 2^-6 to 448. e5m2 has 2 bits and a range from 2^-14 to
57,344. Subnormal numbers add three and two powers of two with fewer bits. The scale moves a
tensor's largest magnitude to the top of the range. Scales are powers of two, so scaling is exact,
both here and where products are scaled back. The only rounding is the one to 8 bits, to nearest. It
does not depend on the scale, except for numbers below about 2^-14 (e4m3) or 2^-29 (e5m2) of the
largest.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.kernels.norm import Unmaterialized
from jaxpar.kernels.platform import Platform, imported_when_used

# ----------------------------------------------------- An array together with its largest magnitude


@flax.struct.dataclass
class WithAmax:
    """An array with its largest magnitude, as computed by the pass that wrote the array.

    Quantizing to 8 bits then needs no separate pass to compute it. This is a `float8.Operand`.

    The gradient of a `WithAmax` is a `WithAmax` too: the gradient of the array, and the largest
    magnitude of that gradient. Use `without_amax` for an array whose gradient will be rounded but
    whose own largest magnitude is not needed.
    """

    values: Any
    """An array of any shape."""
    amax: Any
    """float32 scalar. NaN if the array contains NaN, which XLA's maximum on CPUs may ignore."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def reshape(self, *shape: int) -> "WithAmax":
        """Reshape the values."""
        return WithAmax(self.values.reshape(*shape), self.amax)

    def rows(self) -> "WithAmax":
        return self.reshape(-1, self.shape[-1])

    def max_magnitude(self) -> jax.Array:
        return self.amax

    def readable(self) -> jax.Array:
        return self.values

    def gradient(self, d_x: jax.Array) -> "WithAmax":
        return WithAmax(d_x, self.amax)


def without_amax(values: jax.Array) -> WithAmax:
    """Return an array with a placeholder of 0 for its largest magnitude, which will not be read."""
    return WithAmax(values, jnp.zeros_like(values, jnp.float32, shape=()))


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


# ----------------------- Round a matrix to 8 bits and transpose the result, in one pass over memory
#
# A gradient is contracted along both of its dims, and Hopper's tensor cores read 8-bit operands
# only with the contracted dim contiguous in memory, so both copies are needed. XLA also writes them
# in one pass, but with scattered bytes and rounding in software: 467 us for 16,384 x 14,336 on an
# H200, and 856 us within a step. The memory bandwidth allows 224 us. The kernel
# (`kernels/hopper/quantize_transpose.py`) takes 270 us.
#
# For a norm's output, the kernel reads the norm's input, so the 16-bit output is never written or
# read: 85 us for 16,384 x 4,096. XLA takes 150.


hopper = imported_when_used("jaxpar.kernels.hopper.quantize_transpose")

#: Rows and columns of a tile.
TILE = 128


def quantize_both_ways(
    x: jax.Array | Unmaterialized, scale: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute `quantize(x, scale, dtype)` and its transpose: the same bits on every platform.

    Uses a kernel on NVIDIA GPUs since Hopper, for 16-bit numbers if both sizes are multiples of
    `TILE`; otherwise XLA.

    Args:     x: [rows, columns], or an unmaterialized norm, which is rounded only once, from
              float32. scale: float32 scalar, a power of two.
    Returns:  [rows, columns] and [columns, rows] of `dtype`.
    """
    by = _by_kernel if _kernel_runs(x) else _by_xla
    return by(x, scale, dtype)


def _kernel_runs(x: jax.Array | Unmaterialized) -> bool:
    return (
        Platform.here().runs_elementwise_kernels
        and x.dtype.itemsize == 2
        and not any(n % TILE for n in x.shape)
    )


def _by_xla(x, scale, dtype):
    q = quantize(x.unrounded() if isinstance(x, Unmaterialized) else x, scale, dtype)
    return q, q.T


@functools.partial(jax.jit, static_argnums=2)
def _by_kernel(x, scale, dtype):
    # Inside a jit, because JAX does not remove a bare kernel with unused results from a backward,
    # and then keeps its inputs: 22 GiB of bfloat16 activations for 8B.
    if not isinstance(x, Unmaterialized):
        return hopper.quantize_both_ways(x, scale, dtype, (), hopper.DEFAULT)
    factors = x.scale.reshape(len(x.x)), x.gain.astype(jnp.float32)
    return hopper.quantize_both_ways(x.x, scale, dtype, factors, hopper.DEFAULT)
