"""Predictions beside measurements: the committed runs on H200s, and how far off each prediction is.

`calibration.json` holds the runs, with the command line of each; no constant of `rates.py` is
fitted to one of them alone.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources

from jaxpar.config import Config
from jaxpar.planning.communication import Cluster
from jaxpar.planning.hardware import GIB, H200, NETWORKS
from jaxpar.planning.ranking import predict
from jaxpar.validation import resolve

#: How far a prediction may be off, as a share of what was measured.
MEMORY_BOUND, TIME_BOUND = 0.05, 0.10


@dataclass(frozen=True)
class Run:
    """One measured run. `source` says where the figures are from; peak_gib may be unknown."""

    gpus: int
    run: str
    step_ms: float
    peak_gib: float | None
    source: str


@dataclass(frozen=True)
class Compared:
    """A run beside its prediction; errors are shares of what was measured."""

    run: Run
    step_ms: float
    peak_gib: float

    @property
    def time_error(self) -> float:
        return self.step_ms / self.run.step_ms - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.run.peak_gib
        return None if measured is None else self.peak_gib / measured - 1


def measured_runs() -> list[Run]:
    """The committed runs."""
    text = (resources.files("jaxpar.planning") / "calibration.json").read_text("utf-8")
    return [Run(**row) for row in json.loads(text)["rows"]]


def conditions() -> str:
    """What all of them share."""
    text = (resources.files("jaxpar.planning") / "calibration.json").read_text("utf-8")
    return json.loads(text)["conditions"]


def compare(read: Callable[[list[str]], Config]) -> Iterator[Compared]:
    """Predict each run.

    Args:     read: a command line's config, checked (`cli.read_config`).
    """
    for run in measured_runs():
        cfg = resolve(read(run.run.split()), run.gpus)
        cluster = Cluster(H200, NETWORKS["ib400"], run.gpus, H200.per_host)
        layout = predict(cfg, cluster)
        yield Compared(run, layout.time.total * 1e3, layout.memory.total / GIB)
