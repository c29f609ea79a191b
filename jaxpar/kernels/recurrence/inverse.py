"""The inverse of unit lower triangular matrices, by matrix products.

A triangular solve takes one row after the other. The inverse of two blocks and of what joins them
takes products, which are fast on tensor cores:

    [ I + A   0     ]^-1     [ X      0 ]
    [ B       I + D ]     =  [ -Y B X Y ]        X = (I + A)^-1, Y = (I + D)^-1

No power of A is taken, whose numbers could be far larger than those of the inverse.
"""

import jax
import jax.numpy as jnp

#: Rows of the blocks on the diagonal that are inverted as one tile, with masks for blocks.
TILE = 16


@jax.custom_vjp
def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """Return (I + below)^-1 of matrices [..., C, C] with numbers below the diagonal only."""
    C = below.shape[-1]
    size = 1 << max(C - 1, 0).bit_length()
    padded = jnp.pad(below, [(0, 0)] * (below.ndim - 2) + [(0, size - C)] * 2)
    return _by_halves(padded)[..., :C, :C]


def _by_halves(below: jax.Array) -> jax.Array:
    size = below.shape[-1]
    if size <= TILE:
        return _of_tile(below)
    half = size // 2
    first, second = _by_halves(jnp.stack((below[..., :half, :half], below[..., half:, half:])))
    joined = -(second @ below[..., half:, :half] @ first)
    rows = (first, jnp.zeros_like(first)), (joined, second)
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _of_tile(below: jax.Array) -> jax.Array:
    """Invert blocks of 1, 2, 4, ... rows on the diagonal, all at once."""
    size = below.shape[-1]
    i, j = jnp.arange(size)[:, None], jnp.arange(size)
    inverse, rows = jnp.where(i == j, jnp.ones_like(below), 0.0), 1
    while rows < size:
        joins = (i // (2 * rows) == j // (2 * rows)) & (i // rows != j // rows)
        joined = jnp.where(joins, below, 0.0)
        inverse = inverse - (joined if rows == 1 else inverse @ joined @ inverse)
        rows *= 2
    return inverse


def _forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(below)
    return inverse, inverse


def _backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(transposed @ d_inverse @ transposed, -1),)


unit_lower_inverse.defvjp(_forward, _backward)
