"""The datasets of a run: the sources that it trains on, and the sets that it is evaluated on."""

import dataclasses

from jaxpar.config import Config
from jaxpar.config.schema.items import EvaluationSet, MixtureWeights, Source

#: Names of the evaluations that every run may have, with AVERAGED: of these weights, on HELD_OUT.
HELD_OUT, TEST = "held_out", "test"

#: Sequences in a block of a mixture (`data/mixture.py`). Shares are exact to 1 / BLOCK.
BLOCK = 1 << 16


def held_out_sets(cfg: Config) -> list[EvaluationSet]:
    """Return the sets of `evaluation.sets` with their splits, in order."""
    split = cfg.evaluation.split
    return [dataclasses.replace(one, split=one.split or split) for one in cfg.evaluation.sets]


def sources_of(cfg: Config) -> tuple[Source, ...]:
    """Return the sources to train on: those of `data.mixture`, or only `data.path`."""
    return cfg.data.mixture or (Source(cfg.data.path, 1.0),)


def stages(cfg: Config) -> tuple[MixtureWeights, ...]:
    """Return the weights of the run's stages: those of the sources, then of the schedule."""
    first = MixtureWeights(0, tuple(source.weight for source in sources_of(cfg)))
    return first, *cfg.data.mixture_schedule
