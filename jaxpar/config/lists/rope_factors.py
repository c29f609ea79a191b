"""Reads LongRoPE's divisors, `short_factors` and `long_factors` of the section RopeScaling."""

from jaxpar.components.rope import RopeScaling


def longrope_factors(s: RopeScaling, length: int) -> list[float]:
    """Return the divisor of each pair's frequency for sequences of up to `length` tokens."""
    return numbers_in(s.long_factors if length > s.original_max_position else s.short_factors)


def numbers_in(text: str) -> list[float]:
    """Parse numbers separated by commas.

    Raises:   ValueError for a text that has anything else.
    """
    return [float(part) for part in text.split(",")]


def in_words(numbers: list[float]) -> str:
    """Return numbers as the config has them; parsing restores the same values."""
    return ",".join(repr(float(number)) for number in numbers)
