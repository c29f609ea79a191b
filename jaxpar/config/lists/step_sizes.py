"""The sizes of steps: their sequences and the length of these, by step; and what they count as.

They follow from `train.batch_schedule` and `data.length_schedule`. Everything that counts tokens or
sequences of a run asks `step_sizes`.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.config import Config, OptimizerConfig, flag, replace, require, value_of
from jaxpar.config.schema.items import StepShare

BATCHES, LENGTHS = "train.batch_schedule", "data.length_schedule"

#: The field of the largest size of each schedule.
LARGEST = {BATCHES: "train.global_batch_size", LENGTHS: "data.seq_len"}


class StepSize(NamedTuple):
    """The size of the steps from some step on."""

    step: int
    """Steps before it."""
    rows: int
    """Sequences of a step, on all devices."""
    length: int
    """Tokens of a sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


@dataclass(frozen=True)
class StepSizes:
    """The sizes of all steps: a pure function of the step."""

    sizes: tuple[StepSize, ...]
    """By ascending step, from 0. The last one has no end."""

    def at(self, step: int) -> StepSize:
        """Return the size of the step after `step` steps."""
        return self.sizes[bisect.bisect_right(self.sizes, step, key=lambda size: size.step) - 1]

    def tokens_before(self, steps: int) -> int:
        """Return the tokens of the first steps."""
        return sum(size.tokens * count for size, count in self.until(steps))

    def until(self, steps: int, first: int = 0) -> Iterator[tuple[StepSize, int]]:
        """Yield the sizes of the steps from `first` to `steps`, with the steps of each."""
        ends = [size.step for size in self.sizes[1:]] + [steps]
        for size, end in zip(self.sizes, ends, strict=True):
            count = min(end, steps) - max(size.step, first)
            if count > 0:
                yield size, count

    def steps_of(self, tokens: int) -> int:
        """Return the fewest steps with at least this many tokens."""
        for size, after in itertools.zip_longest(self.sizes, self.sizes[1:]):
            steps = size.step - (self.tokens_before(size.step) - tokens) // size.tokens
            if after is None or steps <= after.step:
                break
        return steps

    def moved(self, step_of: Callable[[int], int]) -> "StepSizes":
        """Return the sizes with other first steps. One that ends before it begins is left out."""
        found = {step_of(size.step): size._replace(step=step_of(size.step)) for size in self.sizes}
        return StepSizes(tuple(found.values()))


def step_sizes(cfg: Config) -> StepSizes:
    """Return the sizes of the run's steps.

    Raises:   ConfigError for a schedule that does not fit the largest size,
              `train.global_batch_size` or `data.seq_len`.
    """
    if not (cfg.train.batch_schedule or cfg.data.length_schedule):
        return StepSizes((StepSize(0, cfg.train.global_batch_size, cfg.data.seq_len),))
    batches, lengths = schedule_of(cfg, BATCHES), schedule_of(cfg, LENGTHS)
    for _, length in lengths:
        _check_length(cfg, length)
    found: list[StepSize] = []
    for step in sorted({*dict(batches), *dict(lengths)}):
        batch, length = _at(batches, step), _at(lengths, step)
        if cfg.data.length_keeps == "tokens":
            size = StepSize(step, batch * (cfg.data.seq_len // length), length)
        else:
            _check_rows(cfg, batch, length)
            size = StepSize(step, batch, length)
        if not found or found[-1][1:] != size[1:]:
            found.append(size)
    return StepSizes(tuple(found))


def sequences_before(cfg: Config, batch: int) -> int:
    """Return the sequences of `data.seq_len` tokens in the first batches of the training text."""
    return step_sizes(cfg).tokens_before(batch) // cfg.data.seq_len


def without_schedules(cfg: Config) -> Config:
    """Return the config with all steps of the largest size."""
    return replace(cfg, **{BATCHES: (), LENGTHS: (), "data.length_keeps": "tokens"})


def config_of(cfg: Config, size: StepSize) -> Config:
    """Return the config with all steps of one size.

    Its microbatches have at most the tokens of those of the largest size: a smaller batch has fewer
    of the same size.

    Args:     cfg: resolved.
    """
    fields = {"train.global_batch_size": size.rows, "data.seq_len": size.length}
    if all(value_of(cfg, path) == value for path, value in fields.items()):
        return without_schedules(cfg)
    count = {"parallel.num_microbatches": _microbatches(cfg, size), "train.micro_batch_size": 0}
    return replace(without_schedules(cfg), **fields, **count)


def in_words(cfg: Config) -> str:
    """Describe the steps of a config, which all have one size."""
    batch, length, count = (
        value_of(cfg, path)
        for path in ("train.global_batch_size", "data.seq_len", "parallel.num_microbatches")
    )
    parts = f" in {count} microbatches" if count > 1 else ""
    return f"steps of {batch:,} sequences of {length:,} tokens{parts}"


def _microbatches(cfg: Config, size: StepSize) -> int:
    p, largest = cfg.parallel, cfg.train.global_batch_size // cfg.parallel.num_microbatches
    if size.length == cfg.data.seq_len:
        return max(size.rows // largest, 1)
    rows = max(size.rows // (p.replica * max(p.data, 1) * p.expert), 1)
    most = largest * cfg.data.seq_len // (p.replica * max(p.data, 1) * p.expert)
    rounds = p.pipeline if p.virtual_stages > 1 else 1
    for count in range(1, rows):
        fits = rows % count == 0 and rows // count * size.length <= most
        if fits and rows // count % p.row_groups == 0 and count % rounds == 0:
            return count
    return rows


def _at(schedule: list[tuple[int, int]], step: int) -> int:
    return next(value for first, value in reversed(schedule) if first <= step)


def schedule_of(cfg: Config, path: str) -> list[tuple[int, int]]:
    """Return a schedule as pairs of step and size; without one, the largest size from step 0."""
    held, largest = value_of(cfg, path), value_of(cfg, LARGEST[path])
    found: list[tuple[int, int]] = [dataclasses.astuple(one) for one in held] or [(0, largest)]
    steps, most = [step for step, _ in found], max(size for _, size in found)
    rule = f"must begin with step 0, but begins with {steps[0]}"
    from_0 = tuple(dataclasses.replace(one, step=one.step * (i > 0)) for i, one in enumerate(held))
    require(steps[0] == 0, cfg, path, rule, flag(path, from_0), flag(path, ()))
    rule = f"has a largest size of {most}, but {LARGEST[path]} is {largest}"
    require(most == largest, cfg, path, rule, flag(LARGEST[path], most), flag(path, ()))
    return found


def _check_length(cfg: Config, length: int) -> None:
    rule = f"must have lengths that divide data.seq_len = {cfg.data.seq_len}, but has {length}"
    require(cfg.data.seq_len % length == 0, cfg, LENGTHS, rule, flag(LENGTHS, ()))


def _check_rows(cfg: Config, batch: int, length: int) -> None:
    pieces = cfg.data.seq_len // length
    rule = f"cuts each sequence of data.seq_len into {pieces} of {length} tokens, which does not "
    rule += f"divide a batch of {batch} sequences"
    ways = flag("data.length_keeps", "tokens"), flag(LENGTHS, ())
    require(batch % pieces == 0, cfg, LENGTHS, rule, *ways)


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
