"""Ranges of numbers: marks of fields, as in `num_heads: Annotated[int, Range(1, 1 << 16)] = 8`.

The largest values are far above what is useful, and below what breaks a program.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, get_args

#: Largest integer: steps, seeds, sizes and tokens are int32 on the devices.
MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """The whole numbers that a field or an option may have."""

    least: int
    most: int = MAX_INT
    good: int | None = None
    """A value that works, for the fix of an error."""

    def __contains__(self, value: Any) -> bool:
        return self.least <= value <= self.most

    def rule(self, value: int) -> str:
        """Return the rule that a value breaks."""
        if value > self.most:
            return f"must be at most {self.most:,}"
        return f"must be at least {self.least}" if self.least else "must not be negative"


@dataclass(frozen=True)
class Reals:
    """The finite real numbers that a field may have."""

    least: float
    most: float = math.inf
    above: bool = False
    """Not `least` itself."""
    below: bool = False
    """Not `most` itself."""

    def __contains__(self, value: Any) -> bool:
        low = value > self.least if self.above else value >= self.least
        return low and (value < self.most if self.below else value <= self.most)

    def rule(self, value: float) -> str:
        """Return the rule that a value breaks."""
        if self.most == math.inf and not self.above and self.least == 0:
            return "must not be negative"
        if self.most == math.inf:
            return f"must be {'above' if self.above else 'at least'} {self.least:g}"
        if not (self.above or self.below):
            return f"must be from {self.least:g} to {self.most:g}"
        low = f"must be {'above' if self.above else 'at least'} {self.least:g}"
        return f"{low} and {'below' if self.below else 'at most'} {self.most:g}"


@dataclass(frozen=True)
class Example:
    """A value that works, of a field without a default; a `Range` has its own."""

    good: Any


@dataclass(frozen=True)
class Needs:
    """What some layer must have for a field to be read, such as "feed_forward.scale"."""

    part: str


# Types of fields.
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Width = Annotated[int, Range(1, 1 << 20, 256)]
Size = Annotated[int, Range(1, 1 << 16, 8)]
Positive = Annotated[float, Reals(0, above=True)]
NotNegative = Annotated[float, Reals(0)]
Fraction = Annotated[float, Reals(0, 1, below=True)]


def declared_range(hint: Any) -> Range | Reals | None:
    """Return the range in a field's type."""
    marks = getattr(hint, "__metadata__", ())
    own = [mark for mark in marks if isinstance(mark, Range | Reals)]
    inner = () if own else (declared_range(one) for one in get_args(hint))
    return next((one for one in (*own, *inner) if one is not None), None)
