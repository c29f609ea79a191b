"""The sequence as matmuls take it: gathered, or one tensor rank's shard at a time.

A matmul may decompose the all-gather over TENSOR that it needs (a collective matmul): it multiplies
this rank's shard while the next one's is on its way. The results are then concatenated in order, or
summed rank by rank. `Shards` holds one part or several, so a layer states what it computes of a
part, not how many there are.

Source:   Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via
          decomposition").
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from jaxpar.parallel.gradient_buffers import buffers_of_use
from jaxpar.parallel.tensor import permutes
from jaxpar.parallel.tensor.sequence import gather_sequence, scatter_sequence
from jaxpar.sharding.axes import TENSOR


@flax.struct.dataclass
class Shards:
    """What a device holds of the sequence between two collectives over TENSOR."""

    parts: tuple[Any, ...]
    """Trees of [B, T/sequence, ...] arrays: a single one, or one per rank's shard in ring order,
    this rank's first."""

    @staticmethod
    def gather(x: jax.Array, *, in_shards: bool) -> "Shards":
        """The shards held across TENSOR, concatenated, or one by one as they arrive.

        Args:     x: [B, T/(sequence*tensor), D], varying over every axis. in_shards: one by one;
                  not with pipeline stages, whose devices do not all reach the same permutes.
        Communication: `gather_sequence`, or `permutes.gather_shards`; its transpose is
                  `reduce_scatter`.
        """
        return Shards(permutes.gather_shards(x, TENSOR) if in_shards else (gather_sequence(x),))

    def each(self, fn: Callable[[Any], Any]) -> "Shards":
        """`fn` of each part."""
        return Shards(tuple(map(fn, self.parts)))

    def map(self, fn: Callable[..., Any], w: dict[str, Any], *rest: Any) -> "Shards":
        """`fn(part, w, *rest)` of each part: the i-th is the i-th use of the weights."""
        return Shards(tuple(fn(p, buffers_of_use(w, i), *rest) for i, p in enumerate(self.parts)))

    def in_order(self) -> Any:
        """The parts as one tree of [B, T/sequence, ...] arrays; a copy, if there are several."""
        if len(self.parts) == 1:
            return self.parts[0]
        concatenate = lambda *parts: permutes.concatenate_shards(parts, TENSOR, 1)  # noqa: E731
        return jax.tree.map(concatenate, *self.parts)

    def split(self, x: jax.Array) -> "Shards":
        """[B, T/sequence, ...] split into parts like these. Its transpose is `in_order`."""
        return Shards((x,) if len(self.parts) == 1 else permutes.split_shards(x, TENSOR, 1))

    def reduce_scatter(self) -> jax.Array:
        """The sum over TENSOR of [B, T/sequence, D], this rank keeping its shard of it.

        Communication: `scatter_sequence`, or `permutes.reduce_shards`, which sends one shard while
                  the next is computed. Its transpose is `gather`.
        """
        if len(self.parts) == 1:
            return scatter_sequence(self.parts[0])
        return permutes.reduce_shards(self.parts, TENSOR)
