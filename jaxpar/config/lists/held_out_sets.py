"""The named sets of text on which a run is evaluated, in addition to its held-out split."""

import dataclasses

from jaxpar.config import Config
from jaxpar.config.schema.items import EvaluationSet

#: Names of the evaluations that every run may have, with AVERAGED: of these weights, on HELD_OUT.
HELD_OUT, TEST = "held_out", "test"


def held_out_sets(cfg: Config) -> list[EvaluationSet]:
    """Return the sets of `evaluation.sets` with their splits, in order."""
    split = cfg.evaluation.split
    return [dataclasses.replace(one, split=one.split or split) for one in cfg.evaluation.sets]
