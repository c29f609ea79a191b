"""The share of a whole step that each step counts as, in learning-rate schedules by tokens."""

import math

from jaxpar.config import Config, OptimizerConfig, flag, replace, require
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.config.schema.items import StepShare

FIELD, STEPS, TOKENS = "optimizer.schedule_by", "steps", "tokens"


def shares_of_steps(optimizer: OptimizerConfig) -> tuple[StepShare, ...]:
    """Return the shares of a resolved config, by ascending step from 0."""
    by = optimizer.schedule_by
    return by if isinstance(by, tuple) else (StepShare(0, 1.0),)


def check_shares(cfg: Config) -> None:
    """Raises:   ConfigError for shares that do not begin with the first step."""
    by = cfg.optimizer.schedule_by
    ok = not isinstance(by, tuple) or (bool(by) and by[0].step == 0)
    require(ok, cfg, FIELD, "must begin with step 0", flag(FIELD, TOKENS))


def fill_shares(cfg: Config) -> Config:
    """Replace "tokens" by the share of each step's tokens in those of the largest step."""
    if cfg.optimizer.schedule_by != TOKENS:
        return cfg
    sizes, most = step_sizes(cfg).sizes, cfg.train.global_batch_size * cfg.data.seq_len
    if len(sizes) == 1:
        return replace(cfg, **{FIELD: STEPS})
    found: list[StepShare] = []
    for size in sizes:
        if not found or found[-1].share != size.tokens / most:
            found.append(StepShare(size.step, size.tokens / most))
    return replace(cfg, **{FIELD: tuple(found)})


def counted(optimizer: OptimizerConfig, steps: int) -> float:
    """Return what the first steps count as together, in whole steps."""
    found = shares_of_steps(optimizer)
    ends = [one.step for one in found[1:]] + [math.inf]
    return sum(
        one.share * max(min(steps, end) - one.step, 0) for one, end in zip(found, ends, strict=True)
    )
