"""Arithmetic on time intervals: sorted, disjoint lists of (start, end) in nanoseconds."""

from collections.abc import Iterable, Sequence

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
