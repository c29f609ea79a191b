"""Reads the requests of the Evaluation Harness for generated text."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from jaxpar.config import ConfigError
from jaxpar.inference.options import Sampling

#: Default maximum of tokens, as in the harness.
MAX_TOKENS = 256

#: The arguments of generation that are honored; `normalize_gen_kwargs` adds the names of limits.
HONORED = ("do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks")

#: Others, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "early_stopping": (False,),
    "use_cache": (True, False),
    "skip_special_tokens": (True,),
}

#: transformers' default of `top_k`, where neither the task nor generation_config.json sets it.
TOP_K = 50


class GenerationRequest(NamedTuple):
    """A request to write text."""

    context: str
    until: tuple[str, ...]
    max_tokens: int
    sampling: Sampling

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn, and are not the likeliest."""
        return self.sampling.temperature > 0

    @classmethod
    def of(
        cls, context: str, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> "GenerationRequest":
        """Read the arguments of a request, as the harness's Hugging Face model does.

        Args:     given: `generation_kwargs`. defaults: of the model's generation_config.json.
        Raises:   ConfigError for one that is unknown or impossible.
        """
        how = _normalized(given)
        for name, value in how.items():
            if name not in HONORED and value is not None and value not in NEUTRAL.get(name, ()):
                fix = f"remove it from the task's generation_kwargs; {', '.join(HONORED)} are known"
                raise ConfigError(f"generation_kwargs.{name}", value, "is not supported", fix)
        until = tuple(stop for stop in how["until"] or () if stop)
        most = _checked("max_gen_toks", int(how["max_gen_toks"]), 1, math.inf)
        if not how.get("do_sample"):
            return cls(context, until, int(most), Sampling(temperature=0.0))
        choose = lambda name, other: _first(how.get(name), (defaults or {}).get(name), other)  # noqa: E731
        sampling = Sampling(
            temperature=_checked("temperature", float(how.get("temperature", 0.0)), 0, math.inf),
            top_k=int(_checked("top_k", int(choose("top_k", TOP_K)), 0, math.inf)),
            top_p=_checked("top_p", float(choose("top_p", 1.0)), 1e-30, 1),
        )
        return cls(context, until, int(most), sampling)


def _normalized(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        how = dict(normalize_gen_kwargs(dict(given), MAX_TOKENS))
    except (TypeError, ValueError) as error:
        rule, fix = f"cannot be read: {error}", "use numbers for the temperature and max_gen_toks"
        raise ConfigError("generation_kwargs", dict(given), rule, fix) from error
    if not all(isinstance(stop, str) for stop in how["until"] if stop is not None):
        fix = 'use until: ["\\n"]'
        raise ConfigError("generation_kwargs.until", how["until"], "must be texts", fix)
    how["until"] = [stop for stop in how["until"] if stop is not None]
    return how


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _checked(name: str, value: float, least: float, most: float) -> float:
    """Raises:   ConfigError for a value out of range, or not finite."""
    if least <= value <= most and math.isfinite(value):
        return value
    rule = f"{least:g} or more" if most == math.inf else f"above 0 and at most {most:g}"
    fix = "change it in the task's YAML file"
    raise ConfigError(f"generation_kwargs.{name}", value, f"must be {rule}", fix)


def sample_numbers(requests: Sequence[Any], seed: int) -> list[int]:
    """Return a number for the random keys of each request, below 2^31.

    It depends on the request's task, question and arguments, on how many equal ones precede it (its
    repeats), and on the seed: not on the other requests, of which a limit or a cache may leave out
    some.
    """
    earlier, found = Counter[str](), []
    for request in requests:
        named = [getattr(request, name, None) for name in ("task_name", "doc_id", "idx")]
        what = json.dumps([named, list(request.args)], default=str, sort_keys=True)
        key = f"{seed} {earlier[what]} {what}".encode()
        earlier[what] += 1
        found.append(int.from_bytes(hashlib.sha256(key).digest()[:4]) >> 1)
    return found
