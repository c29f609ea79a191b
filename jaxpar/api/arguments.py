"""Checks what callers pass: types of arguments, and whether a state and a batch fit a trainer."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.config import ConfigError
from jaxpar.inference.options import Sampling
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.step.state import TrainState


def require_type(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str, fix: str
) -> None:
    """Raises:   ConfigError unless a value has one of the types; True is no number."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        rule = f"must be {what}, not of the type {type(value).__name__}"
        raise ConfigError(name, value, rule, f"use {fix}")


def check_generation(prompt: Any, max_tokens: Any, sampling: Any, stop: Any) -> list[str]:
    """Check the arguments of `generate`. Returns the prompts.

    Raises:   ConfigError for one of the wrong type.
    """
    require_type("prompt", prompt, (str, Sequence), "a text, or a list of texts", 'prompt="def "')
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    texts(prompts, "prompt", 'prompt="def "')
    require_type("max_tokens", max_tokens, int, "a whole number", "max_tokens=100")
    fix = "sampling=jaxpar.Sampling(temperature=0.7)"
    require_type("sampling", sampling, Sampling, "a jaxpar.Sampling", fix)
    for field in dataclasses.fields(sampling):
        kinds = (float, int) if isinstance(field.default, float) else int
        fix = f"jaxpar.Sampling({field.name}={field.default})"
        require_type(field.name, getattr(sampling, field.name), kinds, "a number", fix)
    if isinstance(stop, str) or not isinstance(stop, Collection):
        rule, fix = "must be a list of tokens", 'use stop=["."]'
        raise ConfigError("stop", stop, rule, fix)
    texts(stop, "stop", 'stop=["."]')
    return prompts


def texts(values: Collection[Any], name: str, fix: str) -> None:
    """Raises:   ConfigError for a value that is no text, or cannot be encoded."""
    for value in values:
        require_type(name, value, str, "a text", fix)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            rule = f"has half a character, {value[error.start]!r}, which is no text"
            raise ConfigError(
                name, value, rule, "remove it, or replace it by a question mark"
            ) from None


def check_state(state: Any, wanted: TrainState) -> None:
    """Check that a state belongs to a trainer.

    Args:     wanted: of abstract arrays.
    Raises:   ConfigError that names the first array that differs.
    """
    fix = "use a state of this trainer: init(), load() or step()"
    require_type("state", state, TrainState, "a state of a trainer", "trainer.init()")
    flat = jax.tree_util.tree_leaves_with_path
    here, there = dict(flat(wanted)), dict(flat(state))
    for path in [*here, *there]:
        if path in here and path in there:
            continue
        where = "of another trainer" if path in there else "is not in the state"
        raise ConfigError("state", jax.tree_util.keystr(path), where, fix)
    for path, leaf in here.items():
        found = there[path]
        given = getattr(found, "shape", None), getattr(found, "dtype", None)
        if given != (leaf.shape, leaf.dtype):
            rule = (
                f"has {_described(*given)}, and this trainer's {_described(leaf.shape, leaf.dtype)}"
            )
            raise ConfigError("state", jax.tree_util.keystr(path), rule, fix)


def _described(shape: Any, dtype: Any) -> str:
    return f"no shape ({dtype})" if shape is None else f"{dtype}{list(shape)}"


def check_batch(batch: Any, sizes: Collection[tuple[int, int]], vocab_size: int) -> None:
    """Check that a batch fits a trainer. Tokens are looked at only if they are on the host.

    Args:     sizes: sequences and tokens of each, of the steps of the run.
    Raises:   ConfigError for another size, another type, or a token beyond the vocabulary.
    """
    fix = "use a batch of trainer.batches, or one of its size"
    require_type("batch", batch, Batch, "a Batch", "next(trainer.batches(state))")
    for name in ("tokens", "labels", "segment_ids", "positions"):
        array = getattr(batch, name)
        shape = getattr(array, "shape", None)
        if shape not in sizes or shape != batch.tokens.shape:
            is_one = " or ".join(f"int32 {list(size)}" for size in sorted(sizes))
            raise ConfigError(f"batch.{name}", shape, f"must have the shape of {is_one}", fix)
        if array.dtype != np.int32:
            raise ConfigError(f"batch.{name}", str(array.dtype), "must be int32", fix)
    for name, least in (("tokens", 0), ("labels", IGNORED)):
        array = getattr(batch, name)
        if isinstance(array, np.ndarray) and not least <= array.min() <= array.max() < vocab_size:
            worst = array.min() if array.min() < least else array.max()
            rule = f"must be from {least} to {vocab_size - 1}, below model.vocab_size"
            raise ConfigError(f"batch.{name}", int(worst), rule, "use the tokenizer of the data")
