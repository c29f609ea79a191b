"""Hashes of streams of integers that compose: that of two streams in a row is known from theirs.

So the identity of a dataset does not depend on where its parts end.

Source:   Karp and Rabin, Efficient randomized pattern-matching algorithms, 1987.
"""

import functools
from dataclasses import dataclass

import numpy as np

#: A Mersenne prime.
MODULUS = (1 << 61) - 1

#: Where the polynomial is evaluated: bits of pi, so that nothing is hidden in it.
BASE = 0x13198A2E03707344

#: Values of a block, which is a product of matrices. They are float64, which is exact here: the sum
#: of BLOCK products of VALUE_BITS and LIMB_BITS has less than 53 bits.
BLOCK, VALUE_BITS, LIMB_BITS = 1 << 12, 24, 16


@dataclass
class StreamHash:
    """The hash of a stream: the polynomial with its values as coefficients, the last one constant.

    Damage goes unnoticed with a probability of 2^-61 for each place; it is no protection from
    somebody who looks for a collision.
    """

    value: int = 0
    length: int = 0

    def update(self, values: np.ndarray) -> None:
        """Add values at the end. Args:     values: integers [N] from 0 to 2^48 - 1."""
        head = len(values) % BLOCK
        rows = [values[:head][None], values[head:].reshape(-1, BLOCK)]
        for block in rows:
            shift = pow(BASE, block.shape[1], MODULUS)
            for found in _hashes(block):
                self.value = (self.value * shift + found) % MODULUS
        self.length += len(values)

    def __add__(self, after: "StreamHash") -> "StreamHash":
        """Return the hash of both streams in a row."""
        value = self.value * pow(BASE, after.length, MODULUS) + after.value
        return StreamHash(value % MODULUS, self.length + after.length)

    def hex(self) -> str:
        """Return the hash as 16 digits. The length of the stream is stored elsewhere."""
        return f"{self.value:016x}"


def _hashes(rows: np.ndarray) -> list[int]:
    """Return the hash of each row, not reduced. Args:     rows: integers [N, up to BLOCK]."""
    if not rows.size:
        return []
    if int(rows.max()) >> VALUE_BITS:  # the hash is linear
        low, high = _hashes(rows & ((1 << VALUE_BITS) - 1)), _hashes(rows >> VALUE_BITS)
        return [a + (b << VALUE_BITS) for a, b in zip(low, high, strict=True)]
    sums = rows.astype(np.float64) @ _limbs()[BLOCK - rows.shape[1] :]
    return [sum(int(limb) << LIMB_BITS * i for i, limb in enumerate(row)) for row in sums.tolist()]


@functools.cache
def _limbs() -> np.ndarray:
    """Return the powers of the base, the last one 1, in limbs: float64 [BLOCK, 4]."""
    powers = [1]
    for _ in range(BLOCK - 1):
        powers.append(powers[-1] * BASE % MODULUS)
    mask = (1 << LIMB_BITS) - 1
    limbs = [[power >> LIMB_BITS * i & mask for i in range(4)] for power in reversed(powers)]
    return np.array(limbs, np.float64)
