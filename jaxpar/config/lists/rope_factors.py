"""LongRoPE's divisors, `short_factors` and `long_factors` of the section RopeScaling."""

from jaxpar.components.rope import RopeScaling


def longrope_factors(s: RopeScaling, length: int) -> tuple[float, ...]:
    """Return the divisor of each pair's frequency for sequences of up to `length` tokens."""
    return s.long_factors if length > s.original_max_position else s.short_factors
