"""The 8-bit codes of moments: numbers from -1 to 1, or from 0 to 1, of very different sizes.

Each power of ten is divided into equal intervals, twice as many as the next smaller one: 128, 64,
32 and so on without a sign, half as many with one. So large numbers are precise and small ones are
not lost. A number is stored as its interval, and read as the middle of it; 0 and 1 are exact. These
are the numbers of the dynamic tree type of Dettmers et al. 2022 (2110.02861, section 2.2), as in
bitsandbytes. Unlike there, the signed code is symmetric: it has -1 beside 1, and no numbers below
1e-6.

Without a sign, only 0 is stored as 0: a second moment that vanishes beside a first moment that does
not would be a division by `optimizer.eps` (Li et al. 2023, 2309.01507, section 4.1).

The position of a number among the intervals is concave and linear within each power of ten, so it
is the smallest of a few linear functions, and its inverse the largest of theirs: arithmetic that a
compiler fuses into the update, without tables.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class DynamicCode:
    """Codes with a sign, their upper bit, or without."""

    signed: bool

    @property
    def decades(self) -> int:
        """Powers of ten. The intervals of the j-th, from 1, are [2^j, 2^(j+1)) of the positions."""
        return 6 if self.signed else 7

    @property
    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Slope and value at 0 of the position of a number, in each power of ten: float64."""
        j = np.arange(1, self.decades + 1)
        return 2.0**j / 0.9 * 10.0 ** (self.decades - j), 2.0**j * (1 - 1 / 9)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of numbers, uint8.

        Args:     x: float32, from -1 to 1, or from 0 to 1.
        """
        size, top = jnp.abs(x), 2 ** (self.decades + 1)
        lines = [size * np.float32(a) + np.float32(b) for a, b in zip(*self.lines, strict=True)]
        position = lines[0]
        for line in lines[1:]:
            position = jnp.minimum(position, line)
        # The last interval ends where its middle and 1 are equally near.
        position = jnp.where(position < top - 0.25, position, top)
        code = position.astype(jnp.int32) - 1
        if self.signed:
            code += 128 * (x < 0)
        else:
            code = jnp.maximum(code, (x > 0).astype(jnp.int32))
        return code.astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the numbers of codes, float32."""
        code = codes.astype(jnp.int32)
        middle = (code & 127 if self.signed else code).astype(jnp.float32) + 1.5
        slopes, values = self.lines
        x = jnp.float32(0)
        for a, b in zip(1 / slopes, values / slopes, strict=True):
            x = jnp.maximum(x, middle * np.float32(a) - np.float32(b))
        x = jnp.minimum(x, 1)
        return jnp.where(code < 128, x, -x) if self.signed else x
