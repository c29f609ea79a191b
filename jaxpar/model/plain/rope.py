"""Frequencies of rotary embeddings in plain Python."""

import math

from jaxpar.components.rope import Rope


def rotary_factor(s) -> float:
    """Return what multiplies cosine and sine."""
    if s is None or s.kind not in ("yarn", "longrope"):
        return 1.0
    usual = {
        "yarn": 1 + math.log(s.factor) / 10,
        "longrope": (1 + math.log(s.factor, s.original_max_position)) ** 0.5,
    }
    return usual[s.kind] if s.attention_factor is None else s.attention_factor


def frequency(j: int, half: int, length: int, rope: Rope) -> float:
    """Return the angle per position of pair j, for sequences of `length` tokens."""
    s, inv = rope.scaling, rope.theta ** (-j / half)
    if s is None:
        return inv
    if s.kind == "linear":
        return inv / s.factor
    if s.kind == "proportional":  # turns the first pairs, and the others not
        return inv / s.factor if j < math.floor(s.turning * half) else 0.0
    if s.kind == "yarn":
        return _yarn_frequency(j, half, inv, rope)
    if s.kind == "longrope":
        factors = s.short_factors if length <= s.original_max_position else s.long_factors
        return inv / factors[j]
    return _llama_frequency(inv, s)


def _yarn_frequency(j: int, half: int, inv: float, rope: Rope) -> float:
    """Divide by YaRN's factor where a ramp over pairs has ended, or a part of it on the ramp."""
    s = rope.scaling
    assert s is not None
    # Pair j turns original_max_position * theta^(-j / half) / (2 pi) times; solved for j.
    ends = [
        half * math.log(s.original_max_position / (2 * math.pi * turns), rope.theta)
        for turns in (s.beta_fast, s.beta_slow)
    ]
    if s.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], 2 * half - 1)
    share = min(max((j - first) / (last - first or 0.001), 0), 1)
    return inv * (1 - share) + inv / s.factor * share


def _llama_frequency(inv: float, s) -> float:
    """Apply Llama 3.1's scaling by wavelength, written as in its authors' code."""
    wavelength = 2 * math.pi / inv
    if wavelength < s.original_max_position / s.high_freq_factor:
        return inv
    if wavelength > s.original_max_position / s.low_freq_factor:
        return inv / s.factor
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return (1 - smooth) * inv / s.factor + smooth * inv
