"""The float8 products in plain float32 arithmetic, without 8-bit dtypes: the readable reference.

Rounding is explicit: to a multiple of the spacing of e4m3 or e5m2 at that magnitude.
"""

import jax
import jax.numpy as jnp

#: Mantissa bits, exponent of the smallest normal number, and the largest number.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)

type Format = tuple[int, int, float]


def round_to_float8(x: jax.Array, form: Format, dim: int | None = None) -> jax.Array:
    """Round x to 8 bits, scaled by one power of two, or by one for each slice along `dim`."""
    mantissa, smallest, top = form
    x = x.astype(jnp.float32)
    others = tuple(d for d in range(x.ndim) if d != dim) if dim is not None else None
    max_magnitude = jnp.max(jnp.abs(x), axis=others, keepdims=True)
    scale = 2.0 ** jnp.floor(jnp.log2(top / jnp.where(max_magnitude > 0, max_magnitude, 1.0)))
    scaled = x * scale
    exponent = jnp.floor(jnp.log2(jnp.where(scaled == 0, 1.0, jnp.abs(scaled))))
    spacing = 2.0 ** (jnp.maximum(exponent, smallest) - mantissa)
    return jnp.round(scaled / spacing) * spacing / scale


def products(x: jax.Array, w: jax.Array, dy: jax.Array, scaling: str):
    """Compute the output, the gradient of x and the gradient of w of y = x w, float32.

    Args:     x: [tokens, in]. w: [in, out]. dy: [tokens, out].
    """
    dim = None if scaling == "tensor" else 0
    x8, w8, dy8 = (
        round_to_float8(x, E4M3, dim),
        round_to_float8(w, E4M3),
        round_to_float8(dy, E5M2, dim),
    )
    d_w = x8.T @ dy8 if scaling == "tensor" else x.T @ dy
    return x8 @ w8, dy8 @ w8.T, d_w
