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
