"""Sequences cut into chunks, and how much of a state is left between two tokens of a chunk.

A recurrence over chunks computes most of its work as matmuls. Decays are sums of logarithms, which
are never positive, so that no exponential overflows in a chunk of any length. A document's first
token forgets the state entirely: what would be a logarithm of minus infinity is a mask.

C counts the tokens of a chunk and N the chunks of a sequence.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """Cut [B, T, H, ...] into [N, B, H, C, ...]. The last chunk is filled with zeros."""
    length, count = x.shape[1], math.ceil(x.shape[1] / size)
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, count * size - length)
    x = jnp.pad(x, pad).reshape(x.shape[0], count, size, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def in_sequence(x: jax.Array, length: int) -> jax.Array:
    """Undo `in_chunks`: [N, B, H, C, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


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

    Every sum starts anew at its first token. Differences of sums from the chunk's start would lose
    digits where the state decays fast.

    Args:     log_decay: float32 [B, T, H], of the state before token t, at most 0. begins: bool
              [B, T], the first tokens of documents. size: C.
    """
    g = in_chunks(log_decay, size)
    document = jnp.cumsum(in_chunks(begins[:, :, None].astype(jnp.int32), size), axis=-1)
    i, j = jnp.arange(size)[:, None], jnp.arange(size)
    sums = jnp.cumsum(jnp.where(i > j, g[..., None], 0.0), axis=-2)
    alike = (i >= j) & (document[..., :, None] == document[..., None, :])
    since_start = jnp.where(document == 0, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)
    return Decays(jnp.where(alike, jnp.exp(sums), 0.0), since_start)
