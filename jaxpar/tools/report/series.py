"""Keeps metrics in bounded memory: over ranges of steps, and as histograms."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpar.config.schema.features import objectives
from jaxpar.config.serialize import value_text

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
            at = int((RATIO ** (place + 0.5) - low) / width)
            counts[min(max(at, 0), number - 1)] += count
        return [low + i * width for i in range(number + 1)], counts


# ------------ The figures of a run that the report, its --list and sweeps show: one definition each
#
# A run may have been resumed on other devices, and its steps may change their size. What is per
# device and token is of all steps. What depends on the devices and the size of a step, such as the
# time of a step, is of the steps since these last changed: the run's latest *layout*.


#: Metrics of a record that say how its steps were run, besides the number of devices.
_SIZE = ("global_batch_size", "seq_len")


@dataclass
class Speed:
    """The speed of a run, from its records."""

    rates: Sizes = field(default_factory=Sizes)
    """Tokens per second and device, of all records."""
    mfu: Sizes = field(default_factory=Sizes)
    """Shares, of all records."""
    step_seconds: Sizes = field(default_factory=Sizes)
    """Of the records of the latest layout."""
    devices: int = 0
    """Of the latest layout; 0 if not recorded."""
    _layout: Any = None

    def add(self, values: dict[str, float], predicted: dict[str, float]) -> None:
        """Add a record.

        Args:
          values: its metrics.
          predicted: what the planner predicted when these steps were started; other predictions
            mean another layout.
        """
        rate = values.get("tokens_per_second_per_device", 0.0)
        if rate <= 0 or "step_seconds" not in values:
            return
        devices = round(values.get("tokens_per_second", 0.0) / rate)
        layout = devices, [values.get(name) for name in _SIZE], predicted
        if layout != self._layout:
            self._layout, self.devices, self.step_seconds = layout, devices, Sizes()
        self.rates.add(rate)
        self.mfu.add(values.get("mfu", 0.0))
        self.step_seconds.add(values["step_seconds"])

    @property
    def throughput(self) -> float | None:
        """Tokens per second and device: the median of all records."""
        return self.rates.quantile(0.5) if self.rates else None

    @property
    def step_time(self) -> float | None:
        """Seconds: the median of the records of the latest layout."""
        return self.step_seconds.quantile(0.5) if self.step_seconds else None


def held_out_text(config: dict[str, Any]) -> str:
    """Return what a run's held-out loss is measured on, from its config.json.

    Nats per token compare only between runs with the same tokens and the same objective.
    """
    at = lambda section, name: _section(config, section).get(name)  # noqa: E731
    mixture = at("data", "mixture") and value_text("data.mixture", at("data", "mixture"))
    data = at("data", "held_out") or mixture or at("data", "path") or "unknown data"
    words = [str(data), f"vocabulary of {at('model', 'vocab_size')}"]
    if (split := at("evaluation", "split")) not in (None, "val"):
        words.append(f"split {split}")
    for name, cls in objectives().items():
        if cls.evaluates and (options := _section(config, name)):
            words.append(f"{name} of " + ", ".join(f"{k} {v}" for k, v in options.items()))
    return ", ".join(words)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
