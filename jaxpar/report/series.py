"""Numbers over steps in bounded memory: in ranges of steps, and by size."""

import math
from collections import Counter
from typing import NamedTuple

#: Ranges of steps that a series is kept in; a chart is about so many pixels wide.
RANGES = 320

#: Sizes are told apart by this ratio.
RATIO = 1.0005


class Point(NamedTuple):
    """What a series was in a range of steps."""

    step: int
    """The last that it has."""
    mean: float
    low: float
    high: float
    smooth: float
    """Exponential mean of all up to here."""


class Series:
    """A metric over the steps of a run: mean and extremes of each range of steps.

    With no more steps than RANGES, these are the values themselves.
    """

    def __init__(self, first_step: int, last_step: int, span: float):
        """
        Args:     first_step, last_step: what is added lies after the one, and up to the other.
                  span: values that the exponential mean is of.
        """
        self._first, self._width = first_step, max((last_step - first_step) / RANGES, 1.0)
        self._span, self._count, self._smooth = max(span, 1.0), 0, 0.0
        self._found: dict[int, tuple[int, int, float, float, float, float]] = {}

    def add(self, step: int, value: float) -> None:
        """Count a finite value."""
        # Over a tenth of the values so far, until that is the span: a steep beginning stays steep.
        self._smooth += (value - self._smooth) / min(1 + 0.1 * self._count, self._span)
        self._count += 1
        place = int((step - self._first - 1) / self._width)
        _, count, total, low, high, _ = self._found.get(place, (0, 0, 0.0, value, value, 0.0))
        kept = (step, count + 1, total + value, min(low, value), max(high, value), self._smooth)
        self._found[place] = kept

    def points(self) -> list[Point]:
        """The ranges that have values, in order."""
        ranges = (self._found[place] for place in sorted(self._found))
        return [
            Point(step, total / n, low, high, mean) for step, n, total, low, high, mean in ranges
        ]


class Sizes:
    """How often values of each size were there; exact to RATIO."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value, if it is above 0."""
        if value > 0:
            self._counts[math.floor(math.log(value) / math.log(RATIO))] += 1

    def __len__(self) -> int:
        return self._counts.total()

    def quantile(self, share: float) -> float:
        """A value that this share of all is not above. There must be some."""
        left = share * len(self)
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return _middle(place)
        return _middle(max(self._counts))

    def bars(self, number: int) -> tuple[list[float], list[int]]:
        """A histogram of equal widths, from the least to all but the greatest hundredth.

        Args:     number: bars at most; fewer where sizes would fall between them.
        Returns:  edges, one more than bars; counts, beyond the last edge in the last.
        """
        least = 20  # of RATIO's steps, so that a bar holds several
        low, high = min(self._counts) - 0.5, math.log(self.quantile(0.99), RATIO)
        middle, half = (low + high) / 2, max(high - low, least) / 2
        number = min(number, int(half / 2))
        low, high = RATIO ** (middle - half), RATIO ** (middle + half)
        width, counts = (high - low) / number, [0] * number
        for place, count in self._counts.items():
            at = int((_middle(place) - low) / width)
            counts[min(max(at, 0), number - 1)] += count
        return [low + i * width for i in range(number + 1)], counts


def _middle(place: int) -> float:
    return RATIO ** (place + 0.5)
