"""The sources of the training data and their weights."""

import math
from typing import NamedTuple, NoReturn

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.numerals import number, whole_number


class Share(NamedTuple):
    """One source of a mixture."""

    path: str
    weight: float
    """Share of the sequences, relative to the other weights."""


class WeightsFrom(NamedTuple):
    """The weights of the sources after some steps."""

    step: int
    """Steps before it."""
    weights: tuple[float, ...]


#: Most stages of a schedule, and the last step of any run.
MAX_STAGES, MAX_STEP = 100, 2**31 - 1


def stages(cfg: Config) -> list[WeightsFrom]:
    """Return the weights of the run's stages: those of `shares`, then `data.mixture_schedule`.

    Raises:   ConfigError as `shares`, or for a schedule that is not STEP:WEIGHT,WEIGHT;...
    """
    found = [WeightsFrom(0, tuple(share.weight for share in shares(cfg)))]
    texts = [part.strip() for part in cfg.data.mixture_schedule.split(";")]
    if texts == [""]:
        return found
    path, given, count = "data.mixture_schedule", cfg.data.mixture_schedule, len(found[0].weights)
    example = flag(path, f"1000:{','.join(['1'] * count)}")

    def refuse(rule: str) -> NoReturn:
        raise ConfigError(path, given, rule, f"use, for example, {example}")

    if count == 1:
        refuse("needs data.mixture with several sources")
    if len(texts) > MAX_STAGES:
        refuse(f"has {len(texts)} stages, more than {MAX_STAGES}")
    for text in texts:
        step, _, weights = text.partition(":")
        try:
            stage = WeightsFrom(whole_number(step), tuple(map(number, weights.split(","))))
        except ValueError:
            refuse(f"must be STEP:WEIGHT,WEIGHT;STEP:WEIGHT,WEIGHT, but has {text!r}")
        if stage.step <= found[-1].step:
            refuse(f"must have ascending steps above 0, but has {stage.step}")
        if stage.step > MAX_STEP:
            refuse(f"must have steps of at most {MAX_STEP}, but has {stage.step}")
        if len(stage.weights) != count:
            refuse(f"needs a weight for each of the {count} sources, but has {text!r}")
        if not all(math.isfinite(w) and w >= 0 for w in stage.weights) or not sum(stage.weights):
            refuse(f"needs weights of at least 0, not all of them 0, but has {text!r}")
        found.append(stage)
    return found


def shares(cfg: Config) -> list[Share]:
    """Return the sources to train on: those of `data.mixture`, or only `data.path`.

    Raises:   ConfigError for a mixture that is not PATH:WEIGHT,PATH:WEIGHT.
    """
    if not cfg.data.mixture:
        return [Share(cfg.data.path, 1.0)]
    return [_share(cfg, part.strip()) for part in cfg.data.mixture.split(",")]


def _share(cfg: Config, part: str) -> Share:
    field, text = "data.mixture", cfg.data.mixture
    path, _, weight = part.rpartition(":")
    fix = f"use {flag(field, f'{path or cfg.data.path}:1')}"
    try:
        share = Share(path.strip(), number(weight))
    except ValueError as error:
        rule = f"must be PATH:WEIGHT,PATH:WEIGHT, but {part!r} has no weight"
        raise ConfigError(field, text, rule, f"use {flag(field, f'{part}:1')}") from error
    if not share.path:
        raise ConfigError(field, text, f"must be PATH:WEIGHT, but {part!r} has no path", fix)
    if not (math.isfinite(share.weight) and share.weight > 0):
        rule = f"needs weights above 0, but {share.path} has {weight}"
        raise ConfigError(field, text, rule, fix)
    return share
