"""Sequences cut into chunks, and how much of a state is left between two tokens of a chunk.

A recurrence over chunks computes most of its work as matmuls. Decays are exponentials of sums that
are never positive, so that none overflows in a chunk of any length. A document's first token
forgets the state entirely: what would be a logarithm of minus infinity is a mask.

C counts the tokens of a chunk and N the chunks of a sequence.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

#: A state that decays by exp(LEAST) in one token is 0 in float32.
LEAST = -128.0

#: Sums of multiples of 1 / STEPS are exact in float32 up to 1 << 14: those of 128 tokens at LEAST.
STEPS = 1024.0


def chunks_in(length: int, size: int) -> int:
    """Return N."""
    return math.ceil(length / size)


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """Cut [B, T, H, ...] into [N, B, H, C, ...]. The last chunk is filled with zeros."""
    length, count = x.shape[1], chunks_in(x.shape[1], size)
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, count * size - length)
    x = jnp.pad(x, pad).reshape(x.shape[0], count, size, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def in_sequence(x: jax.Array, length: int) -> jax.Array:
    """Undo `in_chunks`: [N, B, H, C, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


class Sums(NamedTuple):
    """Sums of the logarithms of decays, from a chunk's first token to each of its tokens.

    A difference of two sums would lose digits where the state decays fast before both tokens. So a
    sum has two parts: of what is a multiple of 1 / STEPS, and of the rest. Differences of the first
    are exact, and those of the second small.
    """

    coarse: jax.Array
    fine: jax.Array
    """float32, along the tokens of a chunk. Only `fine` has a gradient, that of both."""

    @property
    def total(self) -> jax.Array:
        """The sums."""
        return self.coarse + self.fine


def sums_of(log_decay: jax.Array, axis: int) -> Sums:
    """Return the sums of decays, whose tokens in a chunk are along an axis."""
    bounded = jnp.maximum(log_decay, LEAST)
    coarse = lax.stop_gradient(jnp.round(bounded * STEPS) / STEPS)
    return Sums(jnp.cumsum(coarse, axis), jnp.cumsum(bounded - coarse, axis))


class Decays(NamedTuple):
    """What is left of a state, between 0 and 1, float32. 0 where a document begins in between."""

    between: jax.Array
    """[N, B, H, C, C]: of what token j wrote, at token i. 0 for j > i, 1 for j = i."""
    since_start: jax.Array
    """[N, B, H, C]: of the state before the chunk, at token i."""

    @property
    def until_end(self) -> jax.Array:
        """[N, B, H, C]: of what token j wrote, after the chunk."""
        return self.between[..., -1, :]

    @property
    def of_chunk(self) -> jax.Array:
        """[N, B, H]: of the state before the chunk, after it."""
        return self.since_start[..., -1]


def decays(log_decay: jax.Array, begins: jax.Array, size: int) -> Decays:
    """Return the decays within each chunk.

    Args:     log_decay: float32 [B, T, H], of the state before token t, at most 0. begins: bool
              [B, T], the first tokens of documents. size: C.
    """
    sums = sums_of(in_chunks(log_decay, size), axis=-1)
    document = jnp.cumsum(in_chunks(begins[:, :, None].astype(jnp.int32), size), axis=-1)
    i, j = jnp.arange(size)[:, None], jnp.arange(size)
    same_document = (i > j) & (document[..., :, None] == document[..., None, :])
    pairs = Sums(*(a[..., :, None] - a[..., None, :] for a in sums))
    # Of pairs that are masked, sums may be positive, and exponentials infinite.
    between = jnp.where(same_document, jnp.exp(jnp.where(same_document, pairs.total, LEAST)), 0.0)
    since_start = jnp.where(document == 0, jnp.exp(sums.total), 0.0)
    return Decays(jnp.where(i == j, 1.0, between), since_start)


# -------------------------------- The inverse of unit lower triangular matrices, by matrix products
#
# A triangular solve takes one row after the other. The inverse of two blocks and of what joins them
# takes products, which are fast on tensor cores:
#
#     [ I + A   0     ]^-1     [ X      0 ]
#     [ B       I + D ]     =  [ -Y B X Y ]        X = (I + A)^-1, Y = (I + D)^-1
#
# No power of A is taken, whose numbers could be far larger than those of the inverse.


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
