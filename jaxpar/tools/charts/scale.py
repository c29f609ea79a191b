"""Maps values to positions on an axis, and chooses its ticks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: An axis of positive values is logarithmic if its ends differ by more than this factor.
LOGARITHMIC = 50.0


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    marks: tuple[float, ...] = ()
    """Values to label in place of round numbers."""

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return `marks`, or at most about `most` round numbers on the axis, with their labels."""
        if self.marks:
            return [(value, short(value)) for value in self.marks]
        if self.log:
            return _decades(self.low, self.high, most)
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(i * step, short(i * step, step)) for i in range(first, last + 1)]


def scale_of(values: Iterable[float], *, least: float = 0.0, log: bool = False) -> Scale:
    """Return an axis that covers the values, with a margin.

    Args:     least: smallest span relative to the largest value, so that noise is not magnified.
              log: whether the axis may be logarithmic.
    """
    held = list(values)
    low, high = min(held), max(held)
    if log and low > 0 and high / low > LOGARITHMIC:
        margin = (high / low) ** 0.04
        return Scale(low / margin, high * margin, True)
    spare = max(least * abs(high) - (high - low), 0.0)
    low, high = (max(low - spare, 0.0) if low >= 0 else low - spare), high
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _round_step(least: float) -> float:
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * f for f in (1, 2, 5, 10) if size * f >= least * (1 - 1e-9))


def _decades(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return powers of ten, with 2 and 5 times them if there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= most:
            break
    return [(value, short(value, value)) for value in found[:: -(-len(found) // most) or 1]]


_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float, precision: float | None = None) -> str:
    """Format a number briefly: 12k, 3.5M, 0.002, 4e-07.

    Args:     precision: resolution of the value; None: four digits.
    """
    if value == 0:
        return "0"
    # 4k on an axis, but 4,009 elsewhere.
    sizes = _SIZES if precision is not None or abs(value) >= 1e4 else ()
    size, letter = next(((s, text) for s, text in sizes if abs(value) >= s), (1.0, ""))
    value /= size
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    exact = abs(value) * 1e-3 if precision is None else precision / size
    digits = max(-math.floor(math.log10(exact) + 1e-9), 0)
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + letter
