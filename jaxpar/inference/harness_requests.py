"""Reads the requests of the Evaluation Harness for generated text."""

import datetime
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import jinja2.ext
import jinja2.sandbox
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from lm_eval.models.utils import normalize_gen_kwargs

from jaxpar.config import Config, ConfigError, Model
from jaxpar.inference.options import Sampling
from jaxpar.model import decode
from jaxpar.sharding.axes import TENSOR

# ------------------------ Renders a conversation by a model's chat template, as `transformers` does


#: Marks the end of a message that is continued, while the template renders it.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    specials: Mapping[str, str],
    *,
    answer: bool = True,
) -> str:
    """Return the text of a conversation.

    If the template refuses the conversation, it is rendered without the system's messages, as the
    Evaluation Harness does.

    Args:     template: Jinja. specials: texts of special tokens by name. answer: add the beginning
              of the assistant's answer; otherwise the last message is left open.
    Raises:   ConfigError if the template cannot be rendered.
    """
    make = _compiled(template)
    try:
        return _render(make, messages, specials, answer)
    except jinja2.TemplateError:
        rest = [message for message in messages if message["role"] != "system"]
    try:
        return _render(make, rest, specials, answer)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        rule = f"cannot render a conversation: {error}"
        fix = "use the template that was published with the model"
        raise ConfigError("chat_template", template[:40], rule, fix) from error


def _render(
    make: Callable[..., str],
    messages: Sequence[Mapping[str, Any]],
    specials: Mapping[str, str],
    answer: bool,
) -> str:
    chat, more = [dict(message) for message in messages], dict(specials)
    if not answer:
        chat[-1]["content"] += _END
    text = make(messages=chat, tools=None, documents=None, add_generation_prompt=answer, **more)
    if answer:
        return text
    at = text.rindex(_END.strip())
    return text[:at] if text[at:].startswith(_END) else text[:at].rstrip()


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Callable[..., str]:
    """Compile a template in the environment that published templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render
    except jinja2.TemplateError as error:
        fix = "use the template that was published with the model"
        raise ConfigError("chat_template", template[:40], f"is not Jinja: {error}", fix) from error


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | how))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


# ---------------------- Scores texts: the log probability of each token, given the tokens before it


#: Positions per row whose logits are in memory at the same time.
POSITIONS = 128

type Scores = Callable[[Any, Any], tuple[jax.Array, jax.Array]]


@functools.cache  # compiled once for all checkpoints of a run
def make_scores(cfg: Config, mesh: Mesh, vocab_size: int) -> Scores:
    """Make the compiled (weights, tokens int32 [B, T]) -> scores of tokens 1 to T - 1.

    The weights come from `generation.weights_for_sampling`. T - 1 is a multiple of POSITIONS; rows
    are padded at the end. The scores are log probabilities in nats, float32 [B, T - 1], and whether
    each token is the most likely one at its position.

    Args:     vocab_size: of the tokenizer. Padded ids have no probability, as in an export.
    """

    def scores(weights: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jax.tree.map(lambda a: a[0], weights)
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        # Nothing reads the cache afterwards, so XLA does not compute it.
        cache = decode.empty_cache(cfg, *read.shape)
        lengths = jnp.full(len(read), read.shape[1], jnp.int32)
        h, _ = decode.prompt(weights, read, lengths, cache, cfg)
        return _in_pieces(weights, h, wanted, cfg.model, vocab_size)

    specs = PartitionSpec(TENSOR), PartitionSpec()
    alike = PartitionSpec(), PartitionSpec()
    apart = jax.shard_map(scores, mesh=mesh, in_specs=specs, out_specs=alike, check_vma=False)
    return jax.jit(apart)


def _in_pieces(
    weights: Any, h: jax.Array, wanted: jax.Array, m: Model, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    B, T, D = h.shape

    def piece(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, ids = xs
        logits = decode.logits(weights, h.reshape(-1, D), m)[:, :vocab_size]
        logits = logits.reshape(B, POSITIONS, -1)
        own = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
        return own - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == ids

    cut = lambda a: jnp.moveaxis(a.reshape(B, T // POSITIONS, POSITIONS, *a.shape[2:]), 1, 0)  # noqa: E731
    done = lax.map(piece, (cut(h), cut(wanted)))
    scores, likeliest = (jnp.moveaxis(a, 0, 1).reshape(B, T) for a in done)
    return scores, likeliest


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
