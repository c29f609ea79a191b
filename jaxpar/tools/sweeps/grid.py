"""Reads the grid of a sweep: values of fields, and their points, each of which is a run."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.config import Config, ConfigError
from jaxpar.config.addresses import addresses_layers, value_at
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.errors import shown
from jaxpar.config.fields import default_of, leaf_paths
from jaxpar.config.listed import split, written
from jaxpar.config.validate import check

#: Most runs of a sweep.
MAX_RUNS = 1000

#: Fields that the sweep sets, or that are the same for all runs of a host.
OF_THE_SWEEP = ("run.dir", "run.cpu_devices", "run.compilation_cache", "checkpoint.resume")

#: Fields of the learning rate's schedule: the compiled step takes it as an input.
SCHEDULE = (
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.schedule_by",
    "optimizer.warmup_steps",
    "optimizer.warmup_fraction",
    "optimizer.decay_steps",
    "optimizer.min_lr_ratio",
    "train.num_steps",
    "train.num_tokens",
)

#: Characters that a run's folder may have.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.=,+-]+")

#: Most characters of a folder's name.
MAX_NAME = 200


@dataclass(frozen=True)
class SweepPoint:
    """A run of a sweep."""

    name: str
    """Its folder, such as learning_rate=0.001,weight_decay=0.1."""
    values: dict[str, str]
    """The text of each field of the grid."""
    cfg: Config
    """Checked."""

    @property
    def flags(self) -> list[str]:
        """The values as flags of the command line."""
        return [f"--{path}={text}" for path, text in self.values.items()]


def points_of(base: Config, texts: Sequence[str]) -> list[SweepPoint]:
    """Return the points of a grid, in the order of its values: the last field varies fastest.

    Args:     texts: each "section.field=value,value". A list of several items is in brackets.
    Raises:   one ConfigError about everything that is wrong: with the grid, or with the config at
              some of its points.
    """
    axes, wrong = _axes(base, texts)
    count = math.prod(map(len, axes.values()))
    if count > MAX_RUNS:
        wrong.append(f"has {count:,} points, but a sweep has at most {MAX_RUNS:,} runs")
        _refuse(texts, wrong)
    points = []
    for texts_of_point in itertools.product(*axes.values()):
        try:
            points.append(_point(base, dict(zip(axes, texts_of_point, strict=True))))
        except ConfigError as error:
            wrong.append(f"{error.field} = {shown(error.value)} {error.rule}")
    _refuse(texts, list(dict.fromkeys(wrong)))
    same = [name for name, n in Counter(point.name for point in points).items() if n > 1]
    _refuse(texts, [f"has two runs with the folder {name}" for name in same])
    return points


def shares_program(axes: Sequence[str]) -> bool:
    """Return whether runs that differ in these fields only can share a compiled step."""
    return set(axes) <= {*SCHEDULE, "train.seed"} and bool(set(axes) & set(SCHEDULE))


def _axes(base: Config, texts: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of each field, and what is wrong."""
    axes: dict[str, list[str]] = {}
    wrong = []
    for text in texts:
        name, given, listed = text.removeprefix("--").partition("=")
        path, values = name.replace("-", "_"), split(listed, ",")
        if not given:
            wrong.append(f"{text!r} is not section.field=value,value")
        elif path not in leaf_paths() and not addresses_layers(base, path):
            wrong.append(f"{path} is not a field")
        elif path in OF_THE_SWEEP or path.startswith("cluster."):
            wrong.append(f"{path} cannot be swept: it is set for all runs")
        elif path in axes:
            wrong.append(f"{path} comes twice")
        elif "" in values:
            wrong.append(f"{path} has an empty value")
        else:
            axes[path] = [_without_brackets(base, path, value) for value in values]
    return axes, wrong


def _without_brackets(base: Config, path: str, text: str) -> str:
    """Return a list of several items as on a command line: [a,b] is a,b."""
    given = default_of(path) if path in leaf_paths() else value_at(base, path)
    in_brackets, inside = text.startswith("[") and text.endswith("]"), text[1:-1]
    is_list = isinstance(given, tuple) or len(split(inside, ",")) > 1
    return inside if in_brackets and is_list else text


def _point(base: Config, values: dict[str, str]) -> SweepPoint:
    """Return a point, whose name has the values as the config reads them.

    Raises:   ConfigError if the config is not valid there.
    """
    cfg = parse_overrides(base, [f"--{path}={text}" for path, text in values.items()])
    check(cfg)
    leaves = [path.rpartition(".")[2] for path in values]
    short = {p: leaf for p, leaf in zip(values, leaves, strict=True) if leaves.count(leaf) == 1}
    parts = [f"{short.get(path, path)}={written(value_at(cfg, path))}" for path in values]
    return SweepPoint(_UNSAFE.sub("_", ",".join(parts))[:MAX_NAME], values, cfg)


def _refuse(texts: Sequence[str], wrong: Sequence[str]) -> None:
    """Raises:   ConfigError if anything is wrong."""
    if wrong:
        path = "optimizer.learning_rate"
        example = f"{path}={default_of(path)},1e-3"
        raise ConfigError("--grid", " ".join(texts), "; ".join(wrong), f"use --grid {example}")
