"""Mix sources by weight in random order, as a pure function of the sequence number.

The endless stream of sequences is divided into blocks of `BLOCK`. Each block has the same number of
sequences from each source, in its own random order. The source of sequence n, and the number of
earlier sequences from that source, therefore depend only on n's block.

With `data.mixture_schedule`, the stream consists of stages, each with its own weights and blocks.

grain's mixing rounds weights to a hundredth of the smallest, and its order is periodic: with two
equal weights, the sources alternate, so every other row of a batch has the same source.
"""

import functools
import zlib
from collections.abc import Sequence

import numpy as np

from jaxpar.config.lists.datasets import BLOCK


class Mixture:
    """The order in which sequences are taken from several sources."""

    def __init__(self, weights: Sequence[float], seed: int):
        """Give each source a share of each block by its weight, at least one sequence."""
        self.counts = apportion(weights, BLOCK)
        self._seed = seed
        self._block = functools.lru_cache(maxsize=4)(self._make_block)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of sequences of the mixed stream in their sources.

        Args:     numbers: int64 [N].
        Returns:  sources, int64 [N]; number of earlier sequences of that source, int64 [N].
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
        """Return how many of the first num_sequences come from each source: int64 [sources]."""
        blocks, rest = divmod(num_sequences, BLOCK)
        part = self._block(blocks)[0][:rest]
        return blocks * self.counts + np.bincount(part, minlength=len(self.counts))

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        # NumPy guarantees the raw numbers of its generators across versions, but not its shuffles.
        draws = np.random.Philox(key=[self._seed, block]).random_raw(BLOCK)
        in_turn = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = in_turn[np.argsort(draws, kind="stable")]
        ranks = np.empty(BLOCK, np.int64)
        firsts = np.cumsum(self.counts) - self.counts
        ranks[np.argsort(sources, kind="stable")] = np.arange(BLOCK) - firsts[in_turn]
        return sources, ranks


class StagedMixture:
    """A mixture whose weights change after some sequences. Each source continues from its place."""

    def __init__(self, starts: Sequence[int], weights: Sequence[Sequence[float]], seed: int):
        """
        Args:     starts: number of the first sequence of each stage, ascending, from 0.
                  weights: of the sources, for each stage.
        """
        self._starts = np.asarray(starts, np.int64)
        # Each stage has a seed of its own, so that stages do not repeat one another's order.
        stages = range(1, len(weights))
        seeds = [seed, *(zlib.crc32(f"{seed} stage {stage}".encode()) for stage in stages)]
        self._stages = [Mixture(*pair) for pair in zip(weights, seeds, strict=True)]
        before = [np.zeros(len(weights[0]), np.int64)]
        for stage, length in zip(self._stages, np.diff(self._starts), strict=False):
            before.append(before[-1] + stage.taken(int(length)))
        self._before = before

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`Mixture.places`."""
        stage_of = np.searchsorted(self._starts, numbers, side="right") - 1
        sources, before = np.empty_like(numbers), np.empty_like(numbers)
        for at in np.unique(stage_of):
            here = stage_of == at
            found, earlier = self._stages[at].places(numbers[here] - self._starts[at])
            sources[here], before[here] = found, earlier + self._before[at][found]
        return sources, before

    def taken(self, num_sequences: int) -> np.ndarray:
        """`Mixture.taken`."""
        at = int(np.searchsorted(self._starts, num_sequences, side="right")) - 1
        return self._before[at] + self._stages[at].taken(num_sequences - int(self._starts[at]))


def apportion(weights: Sequence[float], total: int) -> np.ndarray:
    """Return integers in proportion to weights, by the largest-remainder method.

    Returns:  int64 [weights], which sum to total. 0 for a weight of 0, else at least 1.
    """
    shares = np.asarray(weights, np.float64)
    with np.errstate(over="ignore"):
        if not np.isfinite(np.sum(shares)):
            shares /= np.max(shares)
    exact = shares / np.sum(shares) * total
    least = (np.asarray(weights) > 0).astype(np.int64)
    counts = np.maximum(np.floor(exact).astype(np.int64), least)
    while (missing := total - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        able = np.where((least > 0) & (counts + step >= 1), step * (exact - counts), -np.inf)
        counts[np.argmax(able)] += step
    return counts
