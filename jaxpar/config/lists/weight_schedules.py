"""Weights of losses that change by step: STEP:WEIGHT;STEP:WEIGHT, on straight lines between."""

import itertools
import math
from typing import NamedTuple, NoReturn

from jaxpar.config import Config, ConfigError, flag, replace, value_of
from jaxpar.config.lists.mixture import MAX_STAGES, MAX_STEP
from jaxpar.config.numerals import number, whole_number

#: Schedules, and the fields of the weights that do not change.
Z_LOSS, MTP_LOSS = "train.z_loss_schedule", "train.mtp_loss_schedule"
CONSTANT = {Z_LOSS: "train.z_loss", MTP_LOSS: "train.mtp_loss"}


class Corner(NamedTuple):
    """A point of a schedule."""

    step: int
    """Steps before it."""
    weight: float


def corners(cfg: Config, path: str) -> list[Corner]:
    """Return the points of a schedule; none without one.

    Raises:   ConfigError for a text that is not STEP:WEIGHT;STEP:WEIGHT.
    """
    given = value_of(cfg, path)
    texts = [part.strip() for part in given.split(";")]
    if texts == [""]:
        return []

    def refuse(rule: str) -> NoReturn:
        example = flag(path, "0:0.3;10000:0.3;11000:0.1")
        raise ConfigError(path, given, rule, f"use, for example, {example}")

    if len(texts) > MAX_STAGES:
        refuse(f"has {len(texts)} points, more than {MAX_STAGES}")
    found: list[Corner] = []
    for text in texts:
        step, _, weight = text.partition(":")
        try:
            found.append(Corner(whole_number(step), number(weight)))
        except ValueError:
            refuse(f"must be STEP:WEIGHT;STEP:WEIGHT, but has {text!r}")
    steps = [corner.step for corner in found]
    if steps[0] < 0 or any(one >= other for one, other in itertools.pairwise(steps)):
        refuse(f"must have ascending steps from 0 on, but has {', '.join(map(str, steps))}")
    if steps[-1] > MAX_STEP:
        refuse(f"must have steps of at most {MAX_STEP}, but has {steps[-1]}")
    if not all(math.isfinite(corner.weight) and corner.weight >= 0 for corner in found):
        refuse("must have weights of at least 0")
    if not any(corner.weight for corner in found):
        refuse("must have a weight above 0")
    return found


def with_weights_of(cfg: Config, step: int) -> Config:
    """Return the config with the weights of one step at every step."""
    given = [path for path in CONSTANT if corners(cfg, path)]
    values = {CONSTANT[path]: weight_at(cfg, path, step) for path in given}
    return replace(cfg, **dict.fromkeys(given, ""), **values)


def weight_at(cfg: Config, path: str, step: int) -> float:
    """Return a weight after `step` steps: of its schedule, or the one that does not change."""
    found = corners(cfg, path)
    if not found:
        return float(value_of(cfg, CONSTANT[path]))
    for one, other in itertools.pairwise(found):
        if one.step <= step < other.step:
            share = (step - one.step) / (other.step - one.step)
            return one.weight + share * (other.weight - one.weight)
    return found[0].weight if step < found[0].step else found[-1].weight
