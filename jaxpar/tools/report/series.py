"""Keeps metrics in bounded memory: over ranges of steps, and as histograms."""

import math
from collections import Counter
from typing import NamedTuple

#: Number of step ranges in a series: about one for two pixels of a chart.
RANGES = 320

#: Ratio of consecutive histogram bins.
RATIO = 1.0005

#: Range of magnitudes that are shown, in addition to 0. All float32 values are within it, and
#: sums and ratios of such values are finite.
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-100, 1e100


def can_be_shown(value: float) -> bool:
    """Whether a value is within the range of magnitudes that are shown."""
    return value == 0 or MIN_MAGNITUDE < abs(value) < MAX_MAGNITUDE


class Point(NamedTuple):
    """A series in a range of steps."""

    step: int
    """The last step with a value."""
    mean: float
    low: float
    high: float
    smooth: float
    """Exponential moving average of all values up to here."""


class Series:
    """A metric over the steps of a run: mean, minimum and maximum of each range of steps.

    With at most RANGES steps, these are the values themselves.
    """

    def __init__(self, first_step: int, last_step: int, span: float):
        """
        Args:     first_step, last_step: steps are in (first_step, last_step].
                  span: number of values in the moving average.
        """
        self._first, self._width = first_step, max((last_step - first_step) / RANGES, 1.0)
        self._span, self._count, self._smooth = max(span, 1.0), 0, 0.0
        self._found: dict[int, tuple[int, int, float, float, float, float]] = {}

    def add(self, step: int, value: float) -> None:
        """Add a finite value."""
        # Averages a tenth of the values so far, up to the span, so that a steep start stays steep.
        self._smooth += (value - self._smooth) / min(1 + 0.1 * self._count, self._span)
        self._count += 1
        place = int((step - self._first - 1) / self._width)
        _, count, total, low, high, _ = self._found.get(place, (0, 0, 0.0, value, value, 0.0))
        kept = (step, count + 1, total + value, min(low, value), max(high, value), self._smooth)
        self._found[place] = kept

    def points(self) -> list[Point]:
        """Return the ranges that have values, in order."""
        ranges = (self._found[place] for place in sorted(self._found))
        return [
            Point(step, total / n, low, high, mean) for step, n, total, low, high, mean in ranges
        ]


class Sizes:
    """A histogram of positive values with a relative resolution of RATIO.

    A quantile is the mean of its bin, so that it is exact if the values are equal.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._means: dict[int, float] = {}

    def add(self, value: float) -> None:
        """Add a value, if it is positive."""
        if value > 0:
            place = math.floor(math.log(value) / math.log(RATIO))
            self._counts[place] += 1
            mean = self._means.get(place, value)
            self._means[place] = mean + (value - mean) / self._counts[place]

    def __len__(self) -> int:
        return self._counts.total()

    def quantile(self, share: float) -> float:
        """Return the quantile of a share. There must be at least one value."""
        left = share * len(self)
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return self._means[place]
        return self._means[max(self._counts)]

    def bars(self, number: int) -> tuple[list[float], list[int]]:
        """Return a histogram with bars of equal width, from the minimum to the 99% quantile.

        Args:     number: most bars; fewer if the bins are wider than the bars.
        Returns:  edges, one more than bars; counts, the last of which has all larger values.
        """
        least = 20  # bins, so that a bar has several
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
