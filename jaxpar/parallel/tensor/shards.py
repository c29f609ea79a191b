"""The sequence as matmuls take it: whole, or one tensor rank's shard after another.

A gather over TENSOR may be taken apart by the matmul that needs it (a collective matmul): it takes
this rank's shard while the next one's is on its way, and what it makes is put in order, or added up
rank by rank, afterwards. `Shards` holds one part or several, so a layer says what it computes of a
part, and not how many there are.

Source:   Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via
          decomposition").
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from jaxpar.parallel.gradient_buffers import for_use
from jaxpar.parallel.tensor import permutes
from jaxpar.parallel.tensor.sequence import gather_sequence, scatter_sequence
from jaxpar.sharding.axes import TENSOR


@flax.struct.dataclass
class Shards:
    """What a device holds of the sequence between two collectives over TENSOR."""

    parts: tuple[Any, ...]
    """Trees of [B, T/sequence, ...] arrays: one; or of each rank's shard, this rank's first, then
    the next ones' round the ring."""

    @staticmethod
    def gathered(x: jax.Array, *, apart: bool) -> "Shards":
        """The shards held across TENSOR, side by side; or `apart`, as they come.

        Args:     x: [B, T/(sequence*tensor), D], varying over every axis. apart: not with stages,
                  whose devices do not all come to permutes.
        Communication: `gather_sequence`, or `permutes.pieces`; its transpose is `summed`.
        """
        return Shards(permutes.pieces(x, TENSOR) if apart else (gather_sequence(x),))

    def each(self, fn: Callable[[Any], Any]) -> "Shards":
        """`fn` of each part."""
        return Shards(tuple(map(fn, self.parts)))

    def map(self, fn: Callable[..., Any], w: dict[str, Any], *rest: Any) -> "Shards":
        """`fn(part, w, *rest)` of each part: the i-th is the i-th use of the weights."""
        return Shards(tuple(fn(p, for_use(w, i), *rest) for i, p in enumerate(self.parts)))

    def in_order(self) -> Any:
        """One tree of [B, T/sequence, ...] arrays; a copy, if there are several parts."""
        if len(self.parts) == 1:
            return self.parts[0]
        return jax.tree.map(lambda *parts: permutes.in_order(parts, TENSOR, 1), *self.parts)

    def cut(self, x: jax.Array) -> "Shards":
        """[B, T/sequence, ...] in parts as these are. Its transpose is `in_order`."""
        return Shards((x,) if len(self.parts) == 1 else permutes.apart(x, TENSOR, 1))

    def summed(self) -> jax.Array:
        """The sum over TENSOR of [B, T/sequence, D], this rank keeping its shard of it.

        Communication: `scatter_sequence`, or `permutes.sum_of_pieces`: while one travels, another
                       is
                  made. Its transpose is `gathered`.
        """
        if len(self.parts) == 1:
            return scatter_sequence(self.parts[0])
        return permutes.sum_of_pieces(self.parts, TENSOR)
