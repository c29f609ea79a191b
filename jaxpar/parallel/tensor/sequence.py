"""Collectives for a sequence that is sharded over the tensor axis."""

import jax
from jax import lax

from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import PIPELINE, TENSOR


def gather_sequence(x: jax.Array) -> jax.Array:
    """Gather the sequence shards held across TENSOR, before a column-parallel matmul.

    Args:     x: [B, T/(sequence*tensor), D], varying over every axis.
    Returns:  [B, T/sequence, D].
    Communication: an all-gather over TENSOR, `permutes.permute_all_gather`; with pipeline stages,
              which may run different branches, `permutes.all_to_all_gather`. The transpose is
              `scatter_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    staged = lax.axis_size(PIPELINE) > 1
    gather = permutes.all_to_all_gather if staged else permutes.permute_all_gather
    return gather(x, TENSOR, 1)


def scatter_sequence(x: jax.Array) -> jax.Array:
    """Sum the partial results of a row-parallel matmul and keep this rank's sequence shard.

    Args:     x: [B, T/sequence, D], a partial sum on each rank of TENSOR.
    Returns:  [B, T/(sequence*tensor), D].
    Communication: a reduce-scatter over TENSOR, `permutes.permute_reduce_scatter`; with pipeline
              stages, `permutes.all_to_all_reduce_scatter`. The transpose is `gather_sequence`.
    Source:   Korthikanti et al. 2022 (2205.05198), section 4.2.2.
    """
    staged = lax.axis_size(PIPELINE) > 1
    scatter = permutes.all_to_all_reduce_scatter if staged else permutes.permute_reduce_scatter
    return scatter(x, TENSOR, 1)
