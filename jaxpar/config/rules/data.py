"""Rules about the data sources."""

import dataclasses
import math
from collections.abc import Callable

from jaxpar.config import Config, ConfigError, MixtureWeights, flag, require, value_of
from jaxpar.config.fields import refused
from jaxpar.config.lists.datasets import BLOCK, stages
from jaxpar.config.lists.step_sizes import (
    BATCHES,
    LENGTHS,
    StepSize,
    config_of,
    schedule_of,
    step_sizes,
)


def data(cfg: Config) -> None:
    """Check the weights of the sources, and what marks documents."""
    path, given, count = "data.mixture_schedule", cfg.data.mixture_schedule, len(cfg.data.mixture)
    none = flag(path, ())
    require(not given or count > 1, cfg, path, "needs data.mixture with several sources", none)
    for i, stage in enumerate(given):
        where, weights = f"{path}[{i}].weights", stage.weights
        ways = flag(path, tuple(_with_weights(one, count) for one in given)), none
        if len(weights) != count:
            rule = f"needs a weight for each of the {count} sources"
            raise refused(where, weights, rule, *ways)
        if not any(weights):
            raise refused(where, weights, "must not all be 0", *ways)
    _shares(cfg)
    path, eos = "data.eos_id", cfg.data.eos_id
    rule = "must not be negative, or must be None for files that mark documents"
    require(eos is None or eos >= 0, cfg, path, rule, flag(path, None))


def _with_weights(stage: MixtureWeights, count: int) -> MixtureWeights:
    """Return a stage with a weight for each source, not all of them 0."""
    if len(stage.weights) == count and any(stage.weights):
        return stage
    return dataclasses.replace(stage, weights=(1.0,) * count)


def _shares(cfg: Config) -> None:
    """Check that each source has a sequence of every block, unless its weight is 0."""
    given = cfg.data.mixture_schedule
    for at, stage in enumerate(stages(cfg)):
        enough = _with_shares(stage.weights)
        if enough == stage.weights:
            continue
        i = next(i for i, weight in enumerate(enough) if weight != stage.weights[i])
        if at == 0:
            pairs = zip(cfg.data.mixture, enough, strict=True)
            sources = tuple(dataclasses.replace(one, weight=weight) for one, weight in pairs)
            where, way = f"data.mixture[{i}].weight", flag("data.mixture", sources)
        else:
            raised = (dataclasses.replace(one, weights=_with_shares(one.weights)) for one in given)
            where = f"data.mixture_schedule[{at - 1}].weights[{i}]"
            way = flag("data.mixture_schedule", tuple(raised))
        rule = f"must be at least 1/{BLOCK:,} of the sum of the weights"
        raise refused(where, stage.weights[i], rule, way)


def _with_shares(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return weights that are each 0, or at least 1 / BLOCK of their sum."""
    most = max(weights)
    least = sum(weight / most for weight in weights) / BLOCK * most
    enough = float(f"{2 * least:.2g}")
    return tuple(enough if 0 < weight < least else weight for weight in weights)


def schedules(cfg: Config) -> None:
    """Check that `train.batch_schedule` and `data.length_schedule` fit the largest sizes."""
    step_sizes(cfg)
    path, keeps = "data.length_keeps", cfg.data.length_keeps
    ok = keeps == "tokens" or cfg.data.length_schedule
    require(bool(ok), cfg, path, f"needs {LENGTHS}, which is empty", flag(path, "tokens"))


def sizes_of_steps(cfg: Config, check: Callable[[Config], None]) -> None:
    """Check that each size of steps can be split over the mesh like the largest one.

    Args:     cfg: with the number of microbatches filled in. check: of a config whose steps all
              have one size; raises ConfigError.
    """
    if not (cfg.train.batch_schedule or cfg.data.length_schedule):
        return
    whole, p = cfg.train.global_batch_size, cfg.parallel
    batches = [batch for _, batch in schedule_of(cfg, BATCHES)]
    rows, shared = whole // p.num_microbatches, math.gcd(*batches)
    odd = next((batch for batch in batches if batch % rows), 0)
    rule = f"must have multiples of {rows}, the sequences of a microbatch on all devices, not {odd}"
    ways = [flag(BATCHES, ())]
    if shared % (p.replica * max(p.data, 1) * p.expert * p.row_groups) == 0:
        ways.insert(0, flag("parallel.num_microbatches", whole // shared))
    require(odd == 0, cfg, BATCHES, rule, *ways)
    for size in step_sizes(cfg).sizes:
        try:
            check(config_of(cfg, size))
        except ConfigError as error:
            raise _of_size(cfg, size, error) from error


def _of_size(cfg: Config, size: StepSize, error: ConfigError) -> ConfigError:
    path = LENGTHS if size.length != cfg.data.seq_len else BATCHES
    if not value_of(cfg, path):
        return error
    rule = f"has {size.rows} sequences of {size.length} tokens from step {size.step} on, for which "
    rule += f"{error.field} = {error.value!r} {error.rule}"
    return ConfigError(path, value_of(cfg, path), rule, f"use {flag(path, ())}")
