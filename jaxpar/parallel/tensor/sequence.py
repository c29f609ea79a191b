"""Collectives of a sequence that is cut over the tensor axis."""

import jax
from jax import lax

from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import PIPELINE, TENSOR


def gather_sequence(x: jax.Array) -> jax.Array:
    """Collect the sequence shards held across TENSOR, before a column-parallel matmul.

    Args:     x: [B, T/(sequence*tensor), D], varying over every axis.
    Returns:  [B, T/sequence, D].
    Communication: `permutes.gather` over TENSOR, of a stage's devices alone where there are stages,
              which may each be in a branch of their own; its transpose is `scatter_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    gather = permutes.gather_within if lax.axis_size(PIPELINE) > 1 else permutes.gather
    return gather(x, TENSOR, 1)


def scatter_sequence(x: jax.Array) -> jax.Array:
    """Add the partial results of a row-parallel matmul, keeping one sequence shard.

    Args:     x: [B, T/sequence, D], a partial sum on each rank of TENSOR.
    Returns:  [B, T/(sequence*tensor), D].
    Communication: `permutes.scatter` over TENSOR, of a stage's devices alone where there are
                   stages;
              its transpose is `gather_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    scatter = permutes.scatter_within if lax.axis_size(PIPELINE) > 1 else permutes.scatter
    return scatter(x, TENSOR, 1)


def sequence_pieces(x: jax.Array) -> tuple[jax.Array, ...]:
    """`gather_sequence` in pieces, this rank's first: what is made of it hides that others come.

    Args:     x: [B, T/(sequence*tensor), D], varying over every axis; no stages, whose devices do
              not all come to permutes.
    Returns:  as x, in the order of `permutes.pieces`.
    Communication: `permutes.pieces` over TENSOR; its transpose is `sum_of_sequence_pieces`.
    """
    return permutes.pieces(x, TENSOR)


def sum_of_sequence_pieces(parts: tuple[jax.Array, ...]) -> jax.Array:
    """`scatter_sequence` of pieces: while one travels, another is made.

    Args:     parts: partial sums, in the order and shapes of `sequence_pieces`; or [B, T/sequence,
              D] alone.
    Returns:  [B, T/(sequence*tensor), D].
    Communication: `permutes.sum_of_pieces` over TENSOR, or that of `scatter_sequence`; its
                   transpose
              is `sequence_pieces`, or `gather_sequence`.
    """
    return scatter_sequence(parts[0]) if len(parts) == 1 else permutes.sum_of_pieces(parts, TENSOR)


def sequence_in_order(parts: tuple[jax.Array, ...]) -> jax.Array:
    """What is made of `sequence_pieces`, as [B, T/sequence, ...]; a copy, if they are several. Its
    transpose is `into_sequence_pieces`."""
    return parts[0] if len(parts) == 1 else permutes.in_order(parts, TENSOR, 1)


def into_sequence_pieces(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """[B, T/sequence, ...] in `count` pieces, as `sequence_pieces` has them."""
    return (x,) if count == 1 else permutes.apart(x, TENSOR, 1)
