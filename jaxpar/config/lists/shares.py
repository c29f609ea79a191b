"""The share of a whole step that each step counts as, in learning-rate schedules by tokens."""

import itertools
import math
from typing import NamedTuple

from jaxpar.config import Config, ConfigError, OptimizerConfig, flag, replace
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.config.numerals import number, whole_number

FIELD, STEPS, TOKENS = "optimizer.schedule_by", "steps", "tokens"


class ShareFrom(NamedTuple):
    """The share of the steps from some step on."""

    step: int
    """Steps before it."""
    share: float


def shares_of_steps(optimizer: OptimizerConfig) -> list[ShareFrom]:
    """Return the shares of a resolved config, by ascending step from 0.

    Raises:   ConfigError for a text that is neither "steps" nor STEP:SHARE;STEP:SHARE.
    """
    text = optimizer.schedule_by
    if text in (STEPS, TOKENS):
        return [ShareFrom(0, 1.0)]
    try:
        pairs = [part.partition(":") for part in text.split(";")]
        found = [ShareFrom(whole_number(step), number(share)) for step, _, share in pairs]
        steps = [one.step for one in found]
        ascending = steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps))
        if not ascending or not all(0 < one.share <= 1 for one in found):
            raise ValueError(text)
    except ValueError as error:
        rule = f"must be {STEPS} or {TOKENS}, or shares above 0 from step 0 on"
        raise ConfigError(FIELD, text, rule, f"use {flag(FIELD, TOKENS)}") from error
    return found


def fill_shares(cfg: Config) -> Config:
    """Replace "tokens" by the share of each step's tokens in those of the largest step."""
    if cfg.optimizer.schedule_by != TOKENS:
        return cfg
    sizes, most = step_sizes(cfg).sizes, cfg.train.global_batch_size * cfg.data.seq_len
    if len(sizes) == 1:
        return replace(cfg, **{FIELD: STEPS})
    found: list[ShareFrom] = []
    for size in sizes:
        if not found or found[-1].share != size.tokens / most:
            found.append(ShareFrom(size.step, size.tokens / most))
    return replace(cfg, **{FIELD: ";".join(f"{step}:{share!r}" for step, share in found)})


def counted(optimizer: OptimizerConfig, steps: int) -> float:
    """Return what the first steps count as together, in whole steps."""
    found = shares_of_steps(optimizer)
    ends = [one.step for one in found[1:]] + [math.inf]
    return sum(
        one.share * max(min(steps, end) - one.step, 0) for one, end in zip(found, ends, strict=True)
    )
