"""Rotary position embeddings, and their scaling to longer contexts."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxpar.components.component import Component
from jaxpar.components.dims import DimRule, SmallSizes
from jaxpar.components.ranges import Count, NotNegative, Positive, Reals


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the rotary embedding's frequencies to a longer context than that of training."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "proportional"] = "llama3"
    """How. llama3: divide low frequencies by factor (Llama 3.1). linear: all of them. yarn: those
    of the last dims. longrope: each by its own divisor (Phi-3). proportional: all of them, and
    only the first pairs of dims turn (Gemma 4)."""
    factor: Annotated[float, Reals(1)] = 8.0
    """Factor by which the context length grows."""
    original_max_position: Count = 8192
    """Context length of the original training. Not read by linear."""
    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are divided by factor."""
    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are unchanged."""
    beta_fast: Positive = 32.0
    """yarn: dims with more turns than this within original_max_position are unchanged."""
    beta_slow: Positive = 1.0
    """yarn: dims with fewer turns than this within original_max_position are divided by factor."""
    query_beta: NotNegative = 0.0
    """yarn: multiply queries by 1 + query_beta * log(1 + floor(position / original_max_position)),
    so that scores of later positions are larger (Ministral 3: 0.1). 0: do not."""
    truncate: bool = True
    """yarn: round the ends of the ramp between the two to whole dims. gpt-oss: False."""
    attention_factor: Annotated[float | None, Reals(0, above=True)] = None
    """yarn, longrope: multiply cosine and sine by this. None: the papers' functions of factor."""
    mscale_all_dim: float = 0.0
    """yarn, with kv_lora_rank: multiply attention scores by the square of
    0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek). 0: do not."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for sequences of up to original_max_position tokens,
    one for each pair of rotated dims."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for longer sequences."""
    turning: Annotated[float, Reals(0, 1, above=True)] = 1.0
    """proportional: share of the pairs of dims that turn, the first ones (Gemma 4: 0.25)."""

    def rules(self, pairs: int) -> Iterator[DimRule]:
        """Yield the conditions of the fields. Args:     pairs: of dims that are rotated."""
        for field in dataclasses.fields(self):
            kinds = _READ_BY.get(field.name, (self.kind,))
            ok = self.kind in kinds or getattr(self, field.name) == field.default
            rule = f"needs kind {' or '.join(kinds)}, not {self.kind}"
            yield DimRule(field.name, ok, rule, ((field.name, field.default), ("kind", kinds[0])))
        # Equal in Llama 4, and in Kimi K2.
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            most = getattr(self, high)
            ok = getattr(self, low) <= most or self.kind not in _READ_BY[low]
            yield DimRule(low, ok, f"must be at most {high} = {most}", ((low, most),))
        if self.kind != "longrope":
            return
        name = "original_max_position"
        yield DimRule(name, self.original_max_position >= 2, "must be at least 2", ((name, 8192),))
        for name in ("short_factors", "long_factors"):
            rule = f"must be {pairs} numbers above 0: one a pair of dims"
            ok = _are_factors(getattr(self, name), pairs)
            yield DimRule(name, ok, rule, ((name, (1.0,) * pairs),))


#: The kinds of scaling that read a field. The others need its default.
_READ_BY = {
    "original_max_position": ("llama3", "yarn", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "query_beta": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn", "longrope"),
    "mscale_all_dim": ("yarn",),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
    "turning": ("proportional",),
}


def _are_factors(found: Any, number: int) -> bool:
    """Return whether a field has a number of factors."""
    if not isinstance(found, tuple) or not all(isinstance(one, int | float) for one in found):
        return False
    return len(found) == number and all(0 < one < math.inf for one in found)


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

    def rules(self, rotary_dims: int) -> Iterator[DimRule]:
        """Yield the conditions of the fields. Args:     rotary_dims: dims that are rotated."""
        if self.scaling is None:
            return
        for rule in self.scaling.rules(rotary_dims // 2):
            yield rule.below("scaling")
        ok = self.scaling.kind != "yarn" or self.theta > 1
        fixes = (("theta", type(self).theta),)
        yield DimRule("theta", ok, "must be above 1 for scaling of kind yarn", fixes)

    def shrunk(self, head_dim: int, sizes: SmallSizes) -> "Rope":
        """Return the embedding of narrower heads, and of a shorter context."""
        if (s := self.scaling) is None:
            return self
        if s.kind not in ("linear", "proportional"):
            length = max(round(s.original_max_position * sizes.shorter), 2)
            s = dataclasses.replace(s, original_max_position=length)
        if s.kind == "longrope":
            pairs = int(head_dim * self.fraction) // 2
            short, long = (_some_of(all_, pairs) for all_ in (s.short_factors, s.long_factors))
            s = dataclasses.replace(s, short_factors=short, long_factors=long)
        return dataclasses.replace(self, scaling=s)


def _some_of(factors: tuple[float, ...], pairs: int) -> tuple[float, ...]:
    """Return the factors of fewer pairs of dims, at even distances."""
    return tuple(factors[pair * len(factors) // pairs] for pair in range(pairs))
