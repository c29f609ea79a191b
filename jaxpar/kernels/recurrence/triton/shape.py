"""What the Triton kernels of recurrences know when they are compiled, and what they all load.

Decays are computed where they are needed, from the sums of a chunk's tokens (`chunks.Sums`): three
numbers per token and head are read instead of a matrix [C, C] per head.
"""

from dataclasses import dataclass
from types import SimpleNamespace as Refs
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.attention.triton.compiler import dot, f32, iota, rows, spread


@dataclass(frozen=True)
class RecurrenceShape:
    """The static parameters of a call, whose tokens fill N chunks of C.

    delta: the gated delta rule; otherwise a state space. block: columns of V at a time.
    """

    B: int
    N: int
    C: int
    G: int
    H: int
    K: int
    V: int
    block: int
    dtype: Any
    delta: bool
    interpret: bool

    @property
    def group(self) -> int:
        """Number of heads per head of queries and keys."""
        return self.H // self.G

    @property
    def blocks(self) -> int:
        """Number of blocks of V."""
        return self.V // self.block

    def columns(self, block):
        """Return the index of a block's columns."""
        return rows(block * self.block, self.block)

    @property
    def all_keys(self):
        """Return the index of all columns of a key."""
        return rows(0, self.K)


class ChunkDecays:
    """The decays of a head's chunk, float32. `chunks.Decays` has their meaning."""

    def __init__(self, s: RecurrenceShape, r: Refs, b, n, h):
        self.C = s.C
        here, last = rows(n * s.C, s.C), n * s.C + (s.C - 1)
        self.sums = r.coarse[b, h, here], r.fine[b, h, here]
        self.document = r.document[b, here]
        ends, ends_in = (r.coarse[b, h, last], r.fine[b, h, last]), r.document[b, last]
        total, until = (x[0] + x[1] for x in (self.sums, self._less(ends, self.sums)))
        self.since_start = jnp.where(self.document == 0, jnp.exp(total), 0.0)
        self.until_end = jnp.where(self.document == ends_in, jnp.exp(until), 0.0)
        self.is_last = lax.iota(jnp.int32, s.C) == s.C - 1
        self.of_chunk = jnp.where(ends_in == 0, jnp.exp(ends[0] + ends[1]), 0.0)

    def between(self):
        """[C, C]."""
        shape = self.C, self.C
        rows_of = lambda x: spread(x, shape, 0)  # noqa: E731
        columns_of = lambda x: spread(x, shape, 1)  # noqa: E731
        pairs = self._less([rows_of(x) for x in self.sums], [columns_of(x) for x in self.sums])
        same_document = rows_of(self.document) == columns_of(self.document)
        same_document &= iota(shape, 0) >= iota(shape, 1)
        return jnp.where(same_document, jnp.exp(pairs[0] + pairs[1]), 0.0)

    @staticmethod
    def _less(a, b):
        """Subtract sums: first their exact parts."""
        return a[0] - b[0], a[1] - b[1]


def below_diagonal(C: int):
    """Return the mask of a strictly lower triangular matrix."""
    return iota((C, C), 0) > iota((C, C), 1)


@dataclass(frozen=True)
class TwoParts:
    """A float32 tile as a sum of tiles that tensor cores multiply: two of bfloat16, for 16 bits.

    Unlike TF32, whose right operands Triton transposes in shared memory, bfloat16 is read as it is.
    Where queries and keys are float32, there is one tile: itself.
    """

    parts: tuple[Any, ...]

    @classmethod
    def of(cls, s: RecurrenceShape, x) -> "TwoParts":
        """Split a float32 tile."""
        if s.dtype == f32:
            return cls((x,))
        # Cut instead of rounded: the remainder is exact, and takes no conversion back.
        bits = lax.bitcast_convert_type(x, jnp.int32) & -0x10000
        high = lax.bitcast_convert_type(bits, f32)
        return cls((high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)))

    def __matmul__(self, other: "TwoParts"):
        """Multiply into float32, without the product of low parts. Small products come first."""
        pairs = [(i, j) for i in range(len(self.parts)) for j in range(len(other.parts))]
        found = None
        for i, j in sorted(pairs, key=sum, reverse=True):
            if i + j < 2:
                term = dot(self.parts[i], other.parts[j])
                found = term if found is None else found + term
        return found


def product(s: RecurrenceShape, a, b):
    """Multiply tiles in the dtype of queries and keys, into float32."""
    return dot(a.astype(s.dtype), b.astype(s.dtype))


def scaled(by, x):
    """Multiply each row by a number, in float32."""
    return spread(by, x.shape, 0) * x
