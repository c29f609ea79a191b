"""The products of experts, by the Hopper kernels where they apply, else by `reference.py`.

Rows are sorted by expert in tiles (`tiles.py`). None of these functions is differentiated: their
caller, `model/experts.py`, writes its backward out. Rows that are padding must be finite. Rows past
the tiles in use are neither read nor defined.

    R rows   D and F widths   E experts   T tokens   k experts per token
"""

import jax
import jax.numpy as jnp

from jaxpar.kernels.glu import GeGLU, GluKernel
from jaxpar.kernels.grouped_matmul import reference
from jaxpar.kernels.grouped_matmul.capability import HOPPER_TILE, moves_rows, refusal
from jaxpar.kernels.grouped_matmul.tiles import Tiles
from jaxpar.kernels.platform import imported_when_used

# Mosaic's compiler takes a sixth of a program's import time, and only GPUs need it.
hopper = imported_when_used("jaxpar.kernels.grouped_matmul.hopper")

#: Biases of gate and up, float32 [E, F]: both, or neither.
type Biases = tuple[jax.Array | None, jax.Array | None]

#: Tokens as they arrive, [T, D] in equal parts, so that they need no copy into one array.
type Parts = tuple[jax.Array, ...]


def grouped_matmul(
    x: jax.Array | tuple[jax.Array, ...],
    w: jax.Array | tuple[jax.Array, ...],
    tiles: Tiles,
    *,
    transpose: bool = False,
    expert_dim: int = 0,
) -> jax.Array:
    """Multiply each row by the matrix of its expert.

    Args:     x: [R, in]. w: [E, in, out], or [E, out, in] with `transpose`, in x's dtype. Tuples
              of both give the sum of the products. expert_dim: 0 as above; 1 for [in, E, out] or
              [out, E, in], as a gather over the first width leaves it.
    Returns:  [R, out] in x's dtype, accumulated in float32.
    """
    xs, ws = (x, w) if isinstance(x, tuple) else ((x,), (w,))
    by = hopper if _by_kernel(xs[0], ws[0], tiles, expert_dim) else reference
    return by.grouped_matmul(xs, ws, tiles, transpose=transpose, expert_dim=expert_dim)


def grouped_outer(
    x: jax.Array, y: jax.Array, tiles: Tiles, *, expert_dim: int = 0, dtype=jnp.float32
) -> jax.Array:
    """Compute x^T y over the rows of each expert: the gradient of its matrix.

    Args:     x: [R, M]. y: [R, N]. Of rows that are padding, x or y is 0. dtype: of the result.
    Returns:  [E, M, N], or [M, E, N] with expert_dim 1, accumulated in float32. 0 for an expert
              without rows.
    """
    widths = jax.ShapeDtypeStruct((1, x.shape[1], y.shape[1]), x.dtype)
    by = hopper if _by_kernel(x, widths, tiles, 0) else reference
    return by.grouped_outer(x, y, tiles, expert_dim=expert_dim, dtype=dtype)


def rows_taken(x: Parts, token: jax.Array, tiles: Tiles) -> jax.Array:
    """Copy the token of each row.

    Args:     x: [T, D] in equal parts. token: int32 [R].
    Returns:  [R, D] in x's dtype.
    """
    if _in_hopper_tiles(token, tiles) and moves_rows(x[0].shape[1], x[0].dtype):
        return hopper.rows_taken(x, token, tiles)
    return reference.rows_taken(x, token)


def rows_added(y: jax.Array, rows: jax.Array) -> jax.Array:
    """Sum the rows of each token, in float32 and in the order of `rows`: no atomic additions.

    Args:     y: [R, D]. rows: int32 [T, k]; a negative one stands for no row.
    Returns:  [T, D] in y's dtype.
    """
    by = hopper if moves_rows(y.shape[1], y.dtype) else reference
    return by.rows_added(y, rows)


def glu_hidden(
    glu: GluKernel,
    gate: jax.Array,
    up: jax.Array,
    scale: jax.Array,
    tiles: Tiles,
    biases: Biases = (None, None),
) -> jax.Array:
    """Compute the hidden values of a GLU, times scale.

    Args:     as `glu_backward`.
    Returns:  [R, F] in the dtype of gate.
    """
    by_kernel = _in_hopper_tiles(gate, tiles) and moves_rows(gate.shape[1], gate.dtype)
    if by_kernel and not isinstance(glu, GeGLU):
        return hopper.glu_hidden(glu, gate, up, scale, tiles, biases)
    return reference.glu_hidden(glu, gate, up, scale, tiles, biases).astype(gate.dtype)


def glu_backward(
    glu: GluKernel,
    gate: jax.Array,
    up: jax.Array,
    d_hidden: jax.Array,
    scale: jax.Array,
    tiles: Tiles,
    biases: Biases = (None, None),
) -> tuple[jax.Array, ...]:
    """Compute the hidden values of a GLU again, times scale, and the gradients of their factors.

    Args:     gate, up, d_hidden: [R, F]; d_hidden is the gradient of the scaled hidden values.
              scale: float32 [R]. biases: of gate and up, which do not include them.
    Returns:  (hidden, gradient of gate, gradient of up: [R, F]; of scale: float32 [R]).
    Source:   Guo et al. 2025 (2512.14080), SonicMoE: the router's gradient from the hidden values.
    """
    widths = jax.ShapeDtypeStruct((1, HOPPER_TILE, gate.shape[1]), up.dtype)
    if _by_kernel(gate, widths, tiles, 0) and not isinstance(glu, GeGLU):
        return hopper.glu_backward(glu, gate, up, d_hidden, scale, tiles, biases)
    return reference.glu_backward(glu, gate, up, d_hidden, scale, tiles, biases)


def _by_kernel(x, w, tiles: Tiles, expert_dim: int) -> bool:
    first, second = (n for dim, n in enumerate(w.shape) if dim != expert_dim)
    return _in_hopper_tiles(x, tiles) and refusal(first, second, x.dtype) is None


def _in_hopper_tiles(rows: jax.Array, tiles: Tiles) -> bool:
    return len(rows) == len(tiles.expert) * HOPPER_TILE
