"""Arithmetic on time intervals: sorted, disjoint lists of (start, end) in nanoseconds."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

type Interval = tuple[int, int]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, which may overlap and be unsorted."""
    joined: list[Interval] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(pieces: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time in `pieces` but not in `others`; both are results of `union`."""
    left: list[Interval] = []
    first = 0
    for start, end in pieces:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(pieces: Iterable[Interval]) -> int:
    """Return the total duration in nanoseconds."""
    return sum(end - start for start, end in pieces)


class Cover:
    """Intervals, the result of `union`, that many others are compared with: O(log n) for each."""

    def __init__(self, pieces: Sequence[Interval]):
        self._starts = [start for start, _ in pieces]
        self._ends = [end for _, end in pieces]
        self._before = [0, *accumulate(end - start for start, end in pieces)]

    def outside(self, start: int, end: int) -> int:
        """Return the time between `start` and `end` that is in none of the intervals."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return end - start
        inside = self._before[last] - self._before[first]
        inside -= max(start - self._starts[first], 0) + max(self._ends[last - 1] - end, 0)
        return end - start - inside
