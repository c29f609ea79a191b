"""The products of experts in 8 bits: Hopper kernels where they apply, else `reference.py`.

A row has a scale, a power of two. The kernel that writes a row finds its largest magnitude and
rounds it. The scales of rows and matrices are divided out of the float32 sums, a number per row.
Gradients of matrices sum over rows, so that scales of rows do not divide out, and Hopper's tensor
cores would need transposed copies: they stay in the compute dtype (`api.grouped_outer`).

Hopper's tensor cores accumulate 8-bit products with about 14 bits. Sums have at most D or 2 F
terms, also those of gradients, and are not moved to float32 registers in between.

    R rows   D and F widths   E experts   T tokens   k experts per token
"""

from typing import Any

import flax.struct
import jax

from jaxpar.kernels.float8 import BACKWARD, FORWARD, power_of_two_scale
from jaxpar.kernels.grouped_matmul import reference
from jaxpar.kernels.grouped_matmul.api import Parts
from jaxpar.kernels.grouped_matmul.capability import (
    HOPPER_TILE,
    refusal_in_float8,
    refusal_of_rows,
)
from jaxpar.kernels.grouped_matmul.tiles import Tiles
from jaxpar.kernels.platform import imported_when_used

hopper = imported_when_used("jaxpar.kernels.grouped_matmul.hopper")


@flax.struct.dataclass
class Float8Rows:
    """Rows rounded to 8 bits: `values * inverse[:, None]`."""

    values: tuple[jax.Array, ...]
    """[R, width] each, with common scales."""
    inverse: jax.Array
    """float32 [R], powers of two."""


def scaled_matmul(
    x: Float8Rows,
    w: tuple[jax.Array, ...],
    scale: jax.Array,
    tiles: Tiles,
    *,
    expert_dim: int = 0,
    dtype: Any,
) -> jax.Array:
    """Multiply each row by the matrix of its expert: the sum of the products of all pairs.

    Args:     w: e4m3 [E, out, in], one for each of x's values: values / scale. expert_dim: 0 as
              above; 1 for [out, E, in]. scale: float32 scalar, a power of two. dtype: of the
              result.
    Returns:  [R, out], accumulated in 8-bit products' precision (above).
    """
    (R, K), N = x.values[0].shape, w[0].shape[1 - expert_dim]
    fits = len(tiles.expert) * HOPPER_TILE == R and refusal_in_float8(K, N, dtype) is None
    by = hopper if fits else reference
    of_rows = x.inverse / scale
    return by.scaled_matmul(x.values, w, of_rows, tiles, expert_dim=expert_dim, dtype=dtype)


def rows_taken_in_float8(x: Parts, token: jax.Array, tiles: Tiles) -> Float8Rows:
    """Copy the token of each row, in e4m3.

    Args:     x: [T, D] in equal parts. token: int32 [R].
    """
    if _by_kernel(x[0], token, tiles):
        q, top = hopper.rows_taken_in_float8(x, token, tiles, FORWARD, keep=False)
        return Float8Rows((q,), _inverse(top, FORWARD))
    return rounded((reference.rows_taken(x, token),), FORWARD)


def gradients_taken_in_float8(
    x: Parts, token: jax.Array, tiles: Tiles
) -> tuple[Float8Rows, jax.Array]:
    """Copy the token of each row, in e5m2 and in x's dtype.

    Args:     x: [T, D] in equal parts. token: int32 [R].
    """
    if _by_kernel(x[0], token, tiles):
        q, top, rows = hopper.rows_taken_in_float8(x, token, tiles, BACKWARD, keep=True)
        return Float8Rows((q,), _inverse(top, BACKWARD)), rows
    rows = reference.rows_taken(x, token)
    return rounded((rows,), BACKWARD), rows


def swiglu_in_float8(gate: jax.Array, up: jax.Array, scale: jax.Array, tiles: Tiles) -> Float8Rows:
    """Compute silu(gate) * up * scale in e4m3, rounded once.

    Args:     gate, up: [R, F]. scale: float32 [R].
    """
    by = hopper if _by_kernel(gate, gate, tiles) else reference
    q, top = by.swiglu_in_float8(gate, up, scale, tiles, FORWARD)
    return Float8Rows((q,), _inverse(top, FORWARD))


def swiglu_backward_in_float8(
    gate: jax.Array, up: jax.Array, d_hidden: jax.Array, scale: jax.Array, tiles: Tiles
) -> tuple[tuple[jax.Array, ...], Float8Rows]:
    """Compute `api.glu_backward` of SwiGLU, and the gradients of gate and up also in e5m2."""
    by = hopper if _by_kernel(gate, gate, tiles) else reference
    *made, d_gate, d_up, top = by.swiglu_backward_in_float8(
        gate, up, d_hidden, scale, tiles, BACKWARD
    )
    return tuple(made), Float8Rows((d_gate, d_up), _inverse(top, BACKWARD))


def rounded(arrays: tuple[jax.Array, ...], dtype: Any) -> Float8Rows:
    """Round the rows of arrays to 8 bits with common scales, in a pass of its own.

    Args:     arrays: [R, width] each.
    """
    *values, top = reference.rounded(dtype, *arrays)
    return Float8Rows(tuple(values), _inverse(top, dtype))


def _inverse(top: jax.Array, dtype: Any) -> jax.Array:
    return 1 / power_of_two_scale(top, dtype)


def _by_kernel(x: jax.Array, rows: jax.Array, tiles: Tiles) -> bool:
    in_tiles = len(rows) == len(tiles.expert) * HOPPER_TILE
    return in_tiles and refusal_of_rows(x.shape[1], x.dtype) is None
