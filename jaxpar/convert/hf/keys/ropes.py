"""The keys of config.json about a rotary embedding: its base, its dims, and its scaling.

`RopeKeys` is one rotary embedding. A file has one for all layers, or one for each kind of layer.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

from jaxpar.components.rope import Rope, RopeScaling
from jaxpar.convert.hf.config_file import CORRECT, Values, check_kind, refuse
from jaxpar.convert.hf.keys.latents import score_keys

THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"

#: The keys that each kind reads, all kinds in `KINDS_OF_SCALING`. Others would change the function.
KNOWN = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "yarn": (
        *("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
        *("llama_4_scaling_beta", "max_position_embeddings"),
    ),
    "proportional": ("factor",),
    "longrope": ("factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}

#: Keys that all kinds may have. `finetuned` only says where the weights are from.
OF_ALL = (THETA, PARTIAL, "rope_type", "type", "finetuned", ORIGINAL)


def kind_of(name: Any) -> Any:
    """Return the kind of a `rope_type`: plain RoPE for none, and LongRoPE by its first name."""
    return {None: "default", "su": "longrope"}.get(name, name) if _is_name(name) else name


def _is_name(name: Any) -> bool:
    return name is None or isinstance(name, str)


#: Keys of positions in images.
MROPE = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeKeys:
    """A rotary embedding."""

    theta: float
    scaling: RopeScaling | None
    fraction: float
    """0: none."""

    def made(self, layout: Any) -> Rope | None:
        """Return the component."""
        rope = Rope(theta=self.theta, scaling=self.scaling, fraction=self.fraction, layout=layout)
        return rope if self.fraction else None


def read_rope(rope: Values, values: Values, key: str = THETA) -> RopeKeys:
    """Read a rotary embedding.

    Args:     rope: `rope_parameters`, or the older `rope_scaling`; its `rope_type` was once `type`.
              values: config.json, for what `rope` does not have. key: the base's in it.
    Raises:   ConfigError that names the key that is not supported.
    """
    check_kind(THETA, rope.get(THETA), float)
    theta, key = (rope[THETA], THETA) if rope.get(THETA) is not None else (values.get(key), key)
    check_kind(key, theta, float)
    theta = 10_000.0 if theta is None else theta
    if not 0 < theta <= sys.float_info.max:
        raise refuse(key, theta, "must be above 0, and finite", CORRECT)
    fraction = rope.get(PARTIAL, values.get(PARTIAL))
    fraction = 1.0 if fraction is None else fraction
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        rule = "must be a number above 0 and at most 1"
        raise refuse(PARTIAL, fraction, rule, CORRECT)
    scaling = _scaling(rope, values)
    if scaling is not None and scaling.kind == "proportional":
        return RopeKeys(float(theta), dataclasses.replace(scaling, turning=float(fraction)), 1.0)
    return RopeKeys(float(theta), scaling, float(fraction))


def _scaling(rope: Values, values: Values) -> RopeScaling | None:
    kind = kind_of(rope.get("rope_type", rope.get("type")))
    if not isinstance(kind, str) or kind not in KNOWN:
        fix = f"use a model with rope_type {', '.join(KNOWN)}"
        raise refuse("rope_type", kind, "is a RoPE scaling that jaxpar does not support", fix)
    for key, value in rope.items():
        if key not in KNOWN[kind] + OF_ALL and value is not None:
            rule = f"is not a key of rope_type {kind} that jaxpar supports"
            raise refuse(key, value, rule, "use a model without it")
    if kind == "default":
        return None
    found = _Reader(kind, rope, values)
    readers = {"llama3": _llama3, "linear": _linear, "yarn": _yarn, "longrope": _longrope}
    return (readers | {"proportional": _proportional})[kind](found)


@dataclass(frozen=True)
class _Reader:
    """Reads the numbers of a scaling."""

    kind: str
    rope: Values
    values: Values

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, or the default if there is none."""
        value = self.rope.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(key, value, f"must be a number for rope_type {self.kind}", "add it")
        return float(value)

    def original(self) -> int:
        """Return the length of the original context. Phi-3 has it beside the other keys."""
        beside = self.values.get(ORIGINAL, self.rope.get(ORIGINAL))
        beside = self.values.get("max_position_embeddings") if beside is None else beside
        if isinstance(beside, bool) or not isinstance(beside, int | float) or beside < 1:
            rule = f"must be a number of at least 1 for rope_type {self.kind}"
            raise refuse(ORIGINAL, beside, rule, "add it")
        return int(beside)

    def factor(self) -> float:
        """Return the factor of the context's length, at least 1."""
        most, original = self.values.get("max_position_embeddings"), self.original()
        default = most / original if isinstance(most, int) else None
        return max(self.number("factor", default), 1.0)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        found = self.rope.get(key)
        good = isinstance(found, list) and found != []
        if not good or not all(type(n) in (int, float) and n > 0 for n in found or ()):
            rule = f"must be a list of numbers above 0 for rope_type {self.kind}"
            raise refuse(key, found, rule, "add it")
        return tuple(map(float, found or []))


def _llama3(r: _Reader) -> RopeScaling:
    for key in KNOWN["llama3"]:
        r.number(key)
    return RopeScaling(
        factor=r.number("factor"),
        low_freq_factor=r.number("low_freq_factor"),
        high_freq_factor=r.number("high_freq_factor"),
        original_max_position=r.original(),
    )


def _linear(r: _Reader) -> RopeScaling:
    return RopeScaling(kind="linear", factor=r.number("factor"))


def _proportional(r: _Reader) -> RopeScaling:
    return RopeScaling(kind="proportional", factor=r.number("factor", 1.0))


def _yarn(r: _Reader) -> RopeScaling:
    factor, given = r.factor(), r.rope.get("attention_factor")
    mscale, of_all = r.number("mscale", 0.0), r.number("mscale_all_dim", 0.0)
    if given is None and mscale and of_all:
        grown = lambda scale: 0.1 * scale * math.log(factor) + 1  # noqa: E731
        given = grown(mscale) / grown(of_all)
    truncate = r.rope.get("truncate")
    check_kind("truncate", truncate, bool)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=r.original(),
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        truncate=truncate is not False,
        query_beta=r.number("llama_4_scaling_beta", 0.0),
        attention_factor=None if given is None else _factor(given),
    )


def _longrope(r: _Reader) -> RopeScaling:
    given = r.rope.get("attention_factor")
    return RopeScaling(
        kind="longrope",
        factor=r.factor(),
        original_max_position=r.original(),
        attention_factor=None if given is None else _factor(given),
        short_factors=r.numbers("short_factor"),
        long_factors=r.numbers("long_factor"),
    )


def _factor(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        rule = "must be a number above 0"
        raise refuse("attention_factor", given, rule, CORRECT)
    return float(given)


def without_mrope(rope: Values, values: Values) -> Values:
    """Return a RoPE without the keys of positions in images: text has three equal positions.

    Args:     values: config.json, for the width of heads.
    Raises:   ConfigError when the sections are not all dims that turn.
    """
    sections, width = rope.get("mrope_section"), values.get("head_dim")
    check_kind("mrope_interleaved", rope.get("mrope_interleaved"), bool)
    if sections is not None and isinstance(width, int):
        fraction = rope.get(PARTIAL, values.get(PARTIAL))
        half = int(width * fraction) // 2 if isinstance(fraction, int | float) else 0
        numbers = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
        if not numbers or len(sections) != 3 or sum(sections) != half:
            rule = f"must be three numbers whose sum is {half}, half of what turns of head_dim"
            rule += f" = {width}"
            raise refuse("mrope_section", sections, rule, "remove it: text needs none")
    return {key: value for key, value in rope.items() if key not in MROPE}


def read_null(values: Values) -> RopeKeys | None:
    """Return the rotary embedding of a model that has none, or None if it has one.

    A base of null says that there is none, and so does a `rope_type` of null.

    Raises:   ConfigError when no key says whether there is one: transformers reads such a file as a
              base of 10000, where the model had none.
    """
    key, rope = "rope_parameters", values.get("rope_parameters")
    theta = rope.get(THETA, values.get(THETA)) if isinstance(rope, dict) else values.get(THETA)
    if theta is not None:
        return None
    none = isinstance(rope, dict) and (THETA in rope or rope.get("rope_type", "") is None)
    if not none and THETA not in values:
        fix = f'write {{"{THETA}": null}} for none, or its base'
        raise refuse(key, rope, "does not say whether there are rotary embeddings", fix)
    return RopeKeys(Rope.theta, None, 0.0)


def write_null() -> Values:
    """Return the keys of a model without a rotary embedding, as `read_null` reads them."""
    return {"rope_parameters": {THETA: None, "rope_type": "default"}, THETA: None}


def write_scaling(s: RopeScaling | None) -> Values:
    """Return the keys of a scaling, with its `rope_type`."""
    if s is None:
        return {"rope_type": "default"}
    found: Values = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "proportional":
        found = {"rope_type": s.kind, PARTIAL: s.turning}
        found |= {} if s.factor == 1 else {"factor": s.factor}
    elif s.kind != "linear":
        found[ORIGINAL] = s.original_max_position
    if s.kind == "llama3":
        found |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        found |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
        found |= {"llama_4_scaling_beta": s.query_beta} if s.query_beta else {}
        found |= score_keys(s)
    if s.kind == "longrope":
        found["short_factor"] = list(s.short_factors)
        found["long_factor"] = list(s.long_factors)
    if s.attention_factor is not None:
        found["attention_factor"] = s.attention_factor
    return found


def write_rope(rope: RopeKeys | Rope) -> Values:
    """Return the keys of a rotary embedding, as `read_rope` reads them."""
    partial = {} if rope.fraction == 1 else {PARTIAL: rope.fraction}
    return write_scaling(rope.scaling) | {THETA: rope.theta} | partial
