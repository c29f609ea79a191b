"""The named sets of text on which a run is evaluated, in addition to its held-out split."""

import re
from typing import NamedTuple, NoReturn

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.schema.optimizer import AVERAGED

#: Names of the evaluations that every run may have, with AVERAGED: of these weights, on HELD_OUT.
HELD_OUT, TEST = "held_out", "test"

#: Splits of a dataset.
SPLITS = ("train", "val", "test")

#: Names become parts of the names of metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

#: Most sets: each is evaluated every time.
MAX_SETS = 64


class HeldOutSet(NamedTuple):
    """A set of `evaluation.sets`."""

    name: str
    path: str
    split: str


def held_out_sets(cfg: Config) -> list[HeldOutSet]:
    """Return the sets of `evaluation.sets`, in order.

    Raises:   ConfigError unless they are NAME=PATH or NAME=PATH:SPLIT, with names of their own.
    """
    given, path = cfg.evaluation.sets, "evaluation.sets"

    def refuse(rule: str) -> NoReturn:
        raise ConfigError(path, given, rule, f"use, for example, {flag(path, 'web=data/web')}")

    if not given.strip():
        return []
    found: dict[str, HeldOutSet] = {}
    for part in (part.strip() for part in given.split(",")):
        name, equals, place = part.partition("=")
        if not equals or not place:
            refuse(f"must be NAME=PATH,NAME=PATH, but has {part!r}")
        if not _NAME.fullmatch(name):
            rule = "needs names of at most 64 letters, digits, '_', '-' and '.'"
            refuse(f"{rule}, but has {name!r}")
        if name in found:
            refuse(f"has the name {name} twice")
        if name in (HELD_OUT, TEST, AVERAGED):
            refuse(f"has a set named {name}, which has a meaning of its own")
        found[name] = HeldOutSet(name, *_split_of(place, cfg.evaluation.split))
    if len(found) > MAX_SETS:
        refuse(f"has {len(found)} sets, more than {MAX_SETS}")
    return list(found.values())


def _split_of(place: str, default: str) -> tuple[str, str]:
    """Return the path and the split of PATH or PATH:SPLIT."""
    path, _, split = place.rpartition(":")
    return (path, split) if path and split in SPLITS else (place, default)
