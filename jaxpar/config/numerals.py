"""Reads numbers that people type. Only ASCII digits count.

Python's `int` and `str.isdecimal` also accept the digits of other scripts, which a reader of a
command line may take for something else.
"""

import re
from collections.abc import Callable
from decimal import Decimal


def whole_number(text: str) -> int:
    """Return the whole number that a text is, such as "34", "-1", "10_000" or "10K".

    Raises:   ValueError for any other text.
    """
    return _read(int, text, "a whole number")


def number(text: str) -> float:
    """Return the number that a text is, such as "3e-4" or "1.5B".

    Raises:   ValueError for any other text.
    """
    return _read(float, text, "a number")


def only_digits(text: str) -> bool:
    """Return whether a text has only the digits 0 to 9, and at least one."""
    return text.isascii() and text.isdecimal()


#: What a letter after a number multiplies it by: 350M.
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_WITH_UNIT = re.compile(r"([+-]?\d{1,15}(?:\.\d{1,15})?)([KMBT])", re.ASCII)


def with_unit(value: float) -> str:
    """Return a number as `number` reads it, such as "350M"."""
    unit = next((u for u, size in reversed(_UNITS.items()) if abs(value) >= size), "")
    return f"{value / _UNITS.get(unit, 1):g}{unit}"


def _read[T](read: Callable[[str], T], text: str, what: str) -> T:
    try:
        if with_unit := _WITH_UNIT.fullmatch(text):
            text = f"{Decimal(with_unit[1]) * _UNITS[with_unit[2]]:f}".removesuffix(".0")
        return read(text.encode("ascii").decode())
    except ValueError:  # also of the encoding, and of a number of too many digits
        raise ValueError(f"{text[:60]!r} is not {what}") from None
