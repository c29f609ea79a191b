"""Reads numbers that people type. Only ASCII digits count.

Python's `int` and `str.isdecimal` also accept the digits of other scripts, which a reader of a
command line may take for something else.
"""

from collections.abc import Callable


def whole_number(text: str) -> int:
    """Return the whole number that a text is, such as "34", "-1" or "10_000".

    Raises:   ValueError for any other text.
    """
    return _read(int, text, "a whole number")


def number(text: str) -> float:
    """Return the number that a text is, such as "3e-4".

    Raises:   ValueError for any other text.
    """
    return _read(float, text, "a number")


def only_digits(text: str) -> bool:
    """Return whether a text has only the digits 0 to 9, and at least one."""
    return text.isascii() and text.isdecimal()


def _read[T](read: Callable[[str], T], text: str, what: str) -> T:
    try:
        return read(text.encode("ascii").decode())
    except ValueError:  # also of the encoding, and of a number of too many digits
        raise ValueError(f"{text[:60]!r} is not {what}") from None
