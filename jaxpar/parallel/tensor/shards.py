"""The sequence as matmuls receive it: gathered, or as separate shards, one per tensor rank.

A collective matmul splits the all-gather over TENSOR that it needs: it multiplies one rank's shard
while the next one is in transit. The results are then concatenated in order, or summed rank by
rank. `Shards` holds one part or several, so the code of a layer does not depend on the number of
parts.

Source:   Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via
          decomposition").
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax import lax

from jaxpar.parallel.gradient_buffers import buffers_of_use
from jaxpar.parallel.tensor import permutes
from jaxpar.sharding.axes import PIPELINE, TENSOR


@flax.struct.dataclass
class Shards:
    """A device's activations between two collectives over TENSOR."""

    parts: tuple[Any, ...]
    """One tree of [B, T/sequence, ...] arrays, or one tree per rank's shard of these, in cyclic
    order, starting with this rank's."""

    @staticmethod
    def gather(x: jax.Array, *, in_shards: bool) -> "Shards":
        """Gather the shards held across TENSOR, concatenated or as separate parts.

        Args:     x: [B, T/(sequence*tensor), D], varying over every axis. in_shards: return
                  separate parts. Not with pipeline stages, whose devices do not all reach the same
                  permutes.
        Communication: `gather_sequence`, or `permutes.gather_shards`; the transpose is
                  `reduce_scatter`.
        """
        return Shards(permutes.gather_shards(x, TENSOR) if in_shards else (gather_sequence(x),))

    def each(self, fn: Callable[[Any], Any]) -> "Shards":
        """Apply `fn` to each part."""
        return Shards(tuple(map(fn, self.parts)))

    def map(self, fn: Callable[..., Any], w: dict[str, Any], *rest: Any) -> "Shards":
        """Apply `fn(part, w, *rest)` to each part. The i-th call is the i-th use of the weights."""
        return Shards(tuple(fn(p, buffers_of_use(w, i), *rest) for i, p in enumerate(self.parts)))

    def in_order(self) -> Any:
        """Return the parts as one tree of [B, T/sequence, ...] arrays. Several parts are copied."""
        if len(self.parts) == 1:
            return self.parts[0]
        concatenate = lambda *parts: permutes.concatenate_shards(parts, TENSOR, 1)  # noqa: E731
        return jax.tree.map(concatenate, *self.parts)

    def split(self, x: jax.Array) -> "Shards":
        """Split [B, T/sequence, ...] into as many parts as these. The transpose is `in_order`."""
        return Shards((x,) if len(self.parts) == 1 else permutes.split_shards(x, TENSOR, 1))

    def reduce_scatter(self) -> jax.Array:
        """Sum [B, T/sequence, D] over TENSOR and return this rank's shard.

        Communication: `scatter_sequence`, or `permutes.reduce_shards`, which sends one shard while
                  the next is computed. The transpose is `gather`.
        """
        if len(self.parts) == 1:
            return scatter_sequence(self.parts[0])
        return permutes.reduce_shards(self.parts, TENSOR)


# ---------------------------------- Collectives for a sequence that is sharded over the tensor axis


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
