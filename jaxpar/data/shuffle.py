"""The order of the sequences of a source: a permutation for each epoch, with random access.

Every sequence comes exactly once per epoch, at any number of sequences. A change of this order
changes the data of runs that resume.
"""

from collections.abc import Callable

import numpy as np

#: An order: maps numbers in the endless stream of sequences, int64 [N], to sequences, int64 [N].
type Order = Callable[[np.ndarray], np.ndarray]

#: Rounds of the cipher. With 4, neighbors in the orders of a thousand sequences differ from random
#: ones; with 6 and more, they do not (docs/experiments.md#shuffles).
ROUNDS = 8

#: Bits of the smallest range that the cipher permutes. With 6, some permutations of six sequences
#: are more frequent than others; with 8, all are equally frequent.
MIN_BITS = 8


def sequence_order(num_sequences: int, seed: int | None) -> Order:
    """Return the endless order of the sequences of a source.

    Args:     seed: of a new permutation in each epoch. None: always in text order.
    """
    if seed is None:
        return lambda numbers: numbers % num_sequences
    return lambda numbers: _feistel_order(numbers, num_sequences, seed)


def _feistel_order(numbers: np.ndarray, num_sequences: int, seed: int) -> np.ndarray:
    """Permute 0 ... 2^bits - 1 > num_sequences, again and again until the result is in range.

    "Cycle walking" (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 4): as
    the cipher is a permutation, walking from one number in range to the next is a permutation of
    the range. A step stays in it with a probability of at least one half, unless the range is tiny.
    """
    epochs, found = (part.astype(np.uint64) for part in np.divmod(numbers, num_sequences))
    keys = _mixed(epochs + _mixed(np.array([seed % (1 << 64)], np.uint64)))
    bits = max(num_sequences.bit_length(), MIN_BITS)
    at = np.arange(len(found))
    while at.size:
        found[at] = _encrypted(found[at], keys[at], bits)
        at = at[found[at] >= num_sequences]
    return found.astype(np.int64)


def _encrypted(x_N: np.ndarray, key_N: np.ndarray, bits: int) -> np.ndarray:
    """Permute 0 ... 2^bits - 1 with a Feistel cipher: each round changes one half by the other.

    Args:     x_N, key_N: uint64 [N].
    """
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    halves = [x_N & masks[0], x_N >> low]
    for number in range(ROUNDS):
        this = number % 2
        counter = halves[1 - this] + np.uint64(number << 32)
        halves[this] = halves[this] ^ (_mixed(key_N + counter * _GOLDEN) & masks[this])
    return halves[0] | halves[1] << low


_GOLDEN, _FIRST, _SECOND = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 arrays: the generator SplitMix64 (Steele et al., 2014), variant 13."""
    x = (x ^ x >> np.uint64(30)) * _FIRST
    x = (x ^ x >> np.uint64(27)) * _SECOND
    return x ^ x >> np.uint64(31)
