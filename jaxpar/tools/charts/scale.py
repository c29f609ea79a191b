"""Maps values to positions on an axis, and chooses its ticks."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most about `most` round numbers on the axis, with their labels."""
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(i * step, short(i * step, step)) for i in range(first, last + 1)]


def round_step(least: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is not below a number."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * f for f in (1, 2, 5, 10) if size * f >= least * (1 - 1e-9))


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
