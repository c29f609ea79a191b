"""Checks what callers pass: types of arguments, and whether a state and a batch fit a trainer."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import chex
import jax
import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.inference.options import Sampling
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.step.state import TrainState, abstract_state, state_shardings
from jaxpar.training.run import Run


def require_type(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str, fix: str
) -> None:
    """Raises:   ConfigError unless a value has one of the types; True is not a number."""
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


class Fits:
    """Checks that states and batches are those of a run."""

    def __init__(self, run: Run):
        self._vocab_size = run.cfg.model.vocab_size
        placed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
        shardings = state_shardings(run.cfg, run.mesh)
        self._state = jax.tree.map(placed, abstract_state(run.cfg), shardings)
        self._batch = run.loader.abstract_batch()
        self._sizes = {(size.rows, size.length) for size in step_sizes(run.cfg).sizes}

    def check_state(self, state: Any) -> None:
        """Raises:   ConfigError that names the first array that is of another config or mesh."""
        require_type("state", state, TrainState, "a state of a trainer", "trainer.init()")
        flat = jax.tree_util.tree_leaves_with_path
        here, there = dict(flat(self._state)), dict(flat(state))
        fix = "use a state of this trainer: init(), load() or step()"
        for path in [*here, *there]:
            if path in here and path in there:
                continue
            where = "of another trainer" if path in there else "is not in the state"
            raise ConfigError("state", jax.tree_util.keystr(path), where, fix)
        for path, wanted in here.items():
            if rule := _difference(there[path], wanted):
                raise ConfigError("state", jax.tree_util.keystr(path), rule, fix)

    def check_batch(self, batch: Any) -> None:
        """Check a batch. Tokens are looked at only if they are on the host.

        Raises:   ConfigError for another size, type or mesh, or a token beyond the vocabulary.
        """
        fix = "use a batch of trainer.batches, or one of its size"
        require_type("batch", batch, Batch, "a Batch", "next(trainer.batches(state))")
        there = dict(jax.tree_util.tree_leaves_with_path(batch))
        for path, wanted in jax.tree_util.tree_leaves_with_path(self._batch):
            name, array = f"batch{jax.tree_util.keystr(path)}", there.get(path)
            shape: Any = getattr(array, "shape", ())
            if shape[:2] not in self._sizes or shape[:2] != np.shape(batch.tokens)[:2]:
                is_one = " or ".join(f"int32 {list(size)}" for size in sorted(self._sizes))
                raise ConfigError(name, list(shape), f"must have the shape of {is_one}", fix)
            if (dtype := getattr(array, "dtype", None)) != wanted.dtype:
                raise ConfigError(name, str(dtype), f"must be {wanted.dtype}", fix)
            of_size = wanted.update(shape=shape[:2] + wanted.shape[2:])
            if rule := _difference(array, of_size):
                raise ConfigError(name, shape, rule, fix)
        for name, least in (("tokens", 0), ("labels", IGNORED)):
            self._check_tokens(f"batch.{name}", getattr(batch, name), least)

    def _check_tokens(self, name: str, array: Any, least: int) -> None:
        if not isinstance(array, np.ndarray):
            return
        if not least <= array.min() <= array.max() < self._vocab_size:
            worst = array.min() if array.min() < least else array.max()
            rule = f"must be from {least} to {self._vocab_size - 1}, below model.vocab_size"
            raise ConfigError(name, int(worst), rule, "use the tokenizer of the data")


def _difference(found: Any, wanted: jax.ShapeDtypeStruct) -> str:
    """Return how an array differs from the one that a trainer takes; "" if it fits."""
    try:
        chex.assert_shape(found, wanted.shape)
        chex.assert_type(found, wanted.dtype)
    except (AssertionError, AttributeError, TypeError):
        described = _described(getattr(found, "shape", None), getattr(found, "dtype", None))
        return f"has {described}, and this trainer's {_described(wanted.shape, wanted.dtype)}"
    committed = isinstance(found, jax.Array) and found.committed
    if committed and not found.sharding.is_equivalent_to(wanted.sharding, len(wanted.shape)):
        return f"is on another mesh or sharded otherwise: {found.sharding}"
    return ""


def _described(shape: Any, dtype: Any) -> str:
    return f"no shape ({dtype})" if shape is None else f"{dtype}{list(shape)}"
