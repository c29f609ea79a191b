"""The sources of the training data and their weights."""

import math
from typing import NamedTuple

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.numerals import number


class Share(NamedTuple):
    """One source of a mixture."""

    path: str
    weight: float
    """Share of the sequences, relative to the other weights."""


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
