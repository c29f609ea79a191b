"""Which source each sequence comes from: weighted, in random order, by arithmetic alone.

The endless stream of sequences is cut into blocks of `BLOCK`. Each block takes the same number of
sequences from each source, in an order of its own. So the source of sequence n, and how many of
that source's sequences came before it, need no other block.

grain's own mixing rounds weights to a hundredth of the smallest, and its order is periodic: two
equal weights alternate, and every other row of each batch would be the same source's.
"""

import functools
from collections.abc import Sequence

import numpy as np

#: Sequences in a block: weights are exact to 1 / BLOCK of the whole.
BLOCK = 1 << 16


class Mixture:
    """The order in which sequences are taken from several sources."""

    def __init__(self, weights: Sequence[float], seed: int):
        """Each source gets a share of each block by its weight, and at least one sequence."""
        self.counts = apportion(weights, BLOCK)
        self._seed = seed
        self._block = functools.lru_cache(maxsize=4)(self._make_block)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where sequences of the mixed stream come from.

        Args:     numbers: int64 [N].
        Returns:  sources, int64 [N]; how many sequences each source gave before, int64 [N].
        """
        blocks, within = np.divmod(numbers, BLOCK)
        sources, before = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks):
            here = blocks == block
            source_of, rank_of = self._block(int(block))
            sources[here] = source_of[within[here]]
            before[here] = block * self.counts[sources[here]] + rank_of[within[here]]
        return sources, before

    def taken(self, num_sequences: int) -> np.ndarray:
        """Sequences that each source gives to the first num_sequences: int64 [sources]."""
        blocks, rest = divmod(num_sequences, BLOCK)
        part = self._block(blocks)[0][:rest]
        return blocks * self.counts + np.bincount(part, minlength=len(self.counts))

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        # Raw numbers of the generator: NumPy promises those for ever, and not its shuffles.
        draws = np.random.Philox(key=[self._seed, block]).random_raw(BLOCK)
        in_turn = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = in_turn[np.argsort(draws, kind="stable")]
        ranks = np.empty(BLOCK, np.int64)
        firsts = np.cumsum(self.counts) - self.counts
        ranks[np.argsort(sources, kind="stable")] = np.arange(BLOCK) - firsts[in_turn]
        return sources, ranks


def apportion(weights: Sequence[float], total: int) -> np.ndarray:
    """Whole numbers in proportion to weights, by largest remainders, none of them 0.

    Returns:  int64 [weights], which sum to total.
    """
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := total - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        able = np.where(counts + step >= 1, step * (exact - counts), -np.inf)
        counts[np.argmax(able)] += step
    return counts
