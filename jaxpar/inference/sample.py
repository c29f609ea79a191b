"""Generates text with the model of a run or of a published folder."""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.best import step_of
from jaxpar.checkpoint.saved import saved_steps
from jaxpar.config import ConfigError
from jaxpar.config.options import check_ranges
from jaxpar.inference import speculative
from jaxpar.inference.generation import generate, slots_for
from jaxpar.inference.load import LoadedModel, check_cache, load
from jaxpar.inference.options import MAX_TOKENS, SampleOptions, Sampling
from jaxpar.model.mtp.module import can_draft
from jaxpar.monitoring.samples import write_sample
from jaxpar.runtime.processes import peers
from jaxpar.runtime.stages import stage
from jaxpar.runtime.terminal import write_generated


def check(options: SampleOptions) -> None:
    """Raises:   ConfigError for an option that cannot work."""
    how = options.sampling
    require(bool(options.prompt), "--prompt", "", "must not be empty", '"def "')
    require(all(options.prompt), "--prompt", "", "must not be empty", '"def "')
    check_ranges(options)
    rule = f"stores texts in a run's folder, but {options.run} has no checkpoint"
    runs = not options.save or bool(saved_steps(options.run))
    require(runs, "--save", True, rule, "only with a run")
    check_sampling(how)


def require(ok: bool, name: str, value: Any, rule: str, fix: Any) -> None:
    """Raises:   ConfigError about an option, unless `ok`."""
    if not ok:
        raise ConfigError(name, value, rule, f"use {name} {fix}")


def check_sampling(how: Sampling) -> None:
    """Raises:   ConfigError for a temperature or a `top_p` that cannot work."""
    finite = math.isfinite(how.temperature) and how.temperature >= 0
    require(finite, "--temperature", how.temperature, "must be 0 or more", "0.8")
    require(0 < how.top_p <= 1, "--top-p", how.top_p, "must be above 0 and at most 1", "0.95")


def stop_ids(texts: Sequence[str], tokenizer: Any, ends: Collection[int] = ()) -> set[int]:
    """Return the ids of the end of text, of `texts`, and `ends`.

    Raises:   ConfigError for a text that is not a single token.
    """
    ids = {int(tokenizer.eos_id), *ends}
    for text in texts:
        encoded = [int(i) for i in tokenizer.encode(text)]
        if len(encoded) != 1:
            rule = f"must be one token of the run's tokenizer, not {len(encoded)}"
            raise ConfigError("--stop", text, rule, "use a shorter text, or truncate the output")
        ids.update(encoded)
    return ids


def sample(options: SampleOptions) -> None:
    """Print each prompt, followed by the text that the model generates."""
    check(options)
    speculate = options.speculate == "auto"
    where = options.run, step_of(options.run, options.step), options.tensor
    weights, code = options.weights, options.code
    model = load(*where, log, modules=speculate, weights=weights, code=code)
    cfg, tokenizer = model.cfg, model.tokenizer
    speculate &= can_draft(cfg.model)
    prompts = [model.encode(text) for text in options.prompt]
    longest = max(map(len, prompts))
    slots = slots_for(longest, options.max_tokens)
    held = check_cache(cfg, len(prompts), slots, options.max_tokens, modules=speculate)
    log(f"[KV cache of {len(prompts)} x {slots} tokens: {held / 2**20:,.1f} MiB per device]")
    if longest + options.max_tokens > cfg.data.seq_len:
        log(f"[each token attends to the last {cfg.data.seq_len}, as in training]")
    drafts = speculative.Drafts()
    write_on = functools.partial(speculative.generate, drafts=drafts) if speculate else generate
    made = write_on(
        model.weights,
        cfg,
        model.mesh,
        prompts,
        options.sampling,
        max_tokens=options.max_tokens,
        vocab_size=tokenizer.vocab_size,
        stop=stop_ids(options.stop, tokenizer, model.ends),
    )
    with stage("compiling the model and reading the prompts"):
        next(made)
    began = time.perf_counter()
    rows = _as_it_comes(made, options, tokenizer) if len(prompts) == 1 else _whole(made, prompts)
    seconds, count = time.perf_counter() - began, sum(map(len, rows))
    if len(prompts) > 1:
        for text, ids in zip(options.prompt, rows, strict=True):
            write(f"--- {text}{tokenizer.decode(ids)}\n")
    log(f"[{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens/s]")
    if speculate:
        log(f"[{drafts.rate:.0%} of {drafts.drafted} drafted tokens accepted]")
    if options.save and peers.rank() == 0:
        assert model.step is not None  # `check` requires a run
        _save(options, model.step, [tokenizer.decode(ids) for ids in rows])


def _save(options: SampleOptions, step: int, texts: list[str]) -> None:
    for prompt, text in zip(options.prompt, texts, strict=True):
        write_sample(Path(options.run), step, prompt, text, **dataclasses.asdict(options.sampling))


def log(text: str) -> None:
    """Print a line to standard error, in process 0."""
    if peers.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Print a part of the text, in process 0. All processes have the same text."""
    if peers.rank() == 0:
        write_generated(text)


def _as_it_comes(made: Iterator[list[list[int]]], options: SampleOptions, tokenizer: Any):
    """Print the text as it is generated. Returns its ids."""
    (prompt,), new = options.prompt, []
    shown = prompt
    write(shown)
    for (ids,) in made:
        new.extend(ids)
        text = prompt + tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            write(text[len(shown) :])
            shown = text
    write((prompt + tokenizer.decode(new))[len(shown) :] + "\n")  # no rest follows
    return [new]


def _whole(made: Iterator[list[list[int]]], prompts: Sequence[Any]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    with stage("generating") as now:
        for new in made:
            for row, ids in zip(rows, new, strict=True):
                row.extend(ids)
            now.at(f"token {max(map(len, rows)):,}")
    return rows


# --------------------------------------- Continues texts with a loaded model, for callers in Python


def continuations(
    model: LoadedModel,
    prompts: Sequence[str],
    sampling: Sampling,
    max_tokens: int,
    stop: Sequence[str] = (),
) -> list[str]:
    """Return the text that the model generates after each prompt, without the prompt.

    Args:     prompts: as one batch. stop: tokens that end a text, in addition to the end of text.
    Raises:   ConfigError for values that `python -m jaxpar.sample` refuses.
    """
    if not prompts or not all(prompts):
        raise ConfigError("prompts", prompts, "must not be empty", 'use "def "')
    if not 1 <= max_tokens <= MAX_TOKENS:
        rule = f"must be 1 to {MAX_TOKENS}"
        raise ConfigError("max_tokens", max_tokens, rule, "use max_tokens=100")
    check_sampling(sampling)
    ids = [model.encode(text) for text in prompts]
    slots = slots_for(max(map(len, ids)), max_tokens)
    check_cache(model.cfg, len(ids), slots, max_tokens)
    made = generate(
        model.weights,
        model.cfg,
        model.mesh,
        ids,
        sampling,
        max_tokens=max_tokens,
        vocab_size=model.tokenizer.vocab_size,
        stop=stop_ids(stop, model.tokenizer, model.ends),
    )
    with stage("compiling the model and reading the prompts"):
        next(made)
    rows: list[list[int]] = [[] for _ in prompts]
    with stage("generating") as now:
        for new in made:
            for row, found in zip(rows, new, strict=True):
                row.extend(found)
            now.at(f"token {max(map(len, rows)):,}")
    return list(map(model.tokenizer.decode, rows))
