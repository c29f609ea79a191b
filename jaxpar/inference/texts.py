"""Continues texts with a loaded model, for callers in Python."""

from collections.abc import Sequence

from jaxpar.config import ConfigError
from jaxpar.inference.generation import generate, slots_for
from jaxpar.inference.load import LoadedModel
from jaxpar.inference.memory import check_cache
from jaxpar.inference.options import MAX_TOKENS, Sampling
from jaxpar.inference.sample import check_sampling, stop_ids
from jaxpar.runtime.stages import stage


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
