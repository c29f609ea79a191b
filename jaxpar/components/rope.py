"""Rotary position embeddings, and their scaling to longer contexts."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.component import Component
from jaxpar.components.dims import SmallSizes
from jaxpar.components.ranges import Positive, Reals


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the rotary embedding's frequencies to a longer context than that of training."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "proportional"] = "llama3"
    """How. llama3: divide low frequencies by factor (Llama 3.1). linear: all of them. yarn: those
    of the last dims. longrope: each by a number of its own (Phi-3). proportional: all of them, and
    only the first pairs of dims turn (Gemma 4)."""
    factor: float = 8.0
    """Factor by which the context length grows."""
    original_max_position: int = 8192
    """Context length of the original training. Not read by linear."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: dims with more turns than this within original_max_position are unchanged."""
    beta_slow: float = 1.0
    """yarn: dims with fewer turns than this within original_max_position are divided by factor."""
    query_beta: float = 0.0
    """yarn: multiply queries by 1 + query_beta * log(1 + floor(position / original_max_position)),
    so that scores of later positions are larger (Ministral 3: 0.1). 0: do not."""
    truncate: bool = True
    """yarn: round the ends of the ramp between the two to whole dims. gpt-oss: False."""
    attention_factor: float | None = None
    """yarn, longrope: multiply cosine and sine by this. None: the papers' functions of factor."""
    mscale_all_dim: float = 0.0
    """yarn, with kv_lora_rank: multiply attention scores by the square of
    0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek). 0: do not."""
    short_factors: str = ""
    """longrope: divisors of the frequencies for sequences of up to original_max_position tokens,
    one for each pair of rotated dims, separated by commas."""
    long_factors: str = ""
    """longrope: divisors of the frequencies for longer sequences."""
    turning: float = 1.0
    """proportional: share of the pairs of dims that turn, the first ones (Gemma 4: 0.25)."""


@dataclass(frozen=True, kw_only=True)
class Rope(Component):
    """A rotary position embedding."""

    theta: Positive = 500_000.0
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies to a longer context."""
    fraction: Annotated[float, Reals(0, 1, above=True)] = 1.0
    """Share of each head's dims that are rotated, the first ones (GLM-4.5: 0.5)."""
    layout: Literal["halves", "interleaved"] = "halves"
    """Which dims are rotated together. halves: one of the first half with one of the second.
    interleaved: neighbors (Helium, ERNIE 4.5)."""

    def shrunk(self, head_dim: int, sizes: SmallSizes) -> "Rope":
        """Return the embedding of narrower heads, and of a shorter context."""
        if (s := self.scaling) is None:
            return self
        if s.kind not in ("linear", "proportional"):
            length = max(round(s.original_max_position * sizes.shorter), 2)
            s = dataclasses.replace(s, original_max_position=length)
        if s.kind == "longrope":
            pairs = int(head_dim * self.fraction) // 2
            short, long = (_some_of(text, pairs) for text in (s.short_factors, s.long_factors))
            s = dataclasses.replace(s, short_factors=short, long_factors=long)
        return dataclasses.replace(self, scaling=s)


def _some_of(factors: str, pairs: int) -> str:
    """Return the factors of fewer pairs of dims, at even distances."""
    numbers = factors.split(",")
    return ",".join(numbers[pair * len(numbers) // pairs] for pair in range(pairs))
