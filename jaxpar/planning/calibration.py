"""Predictions beside measurements: the committed runs on H200s, and how far off each prediction is.

`calibration.json` holds the runs, with the command line of each; no constant of
`planning/predict/rates.py` is fitted to one of them alone. Beside them it holds XLA's own plans of
the memory of compiled steps.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources

from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB, H200, NETWORKS
from jaxpar.planning.ranking import Layout, predict

#: How far a prediction may be off, as a share of what was measured.
MEMORY_BOUND, TIME_BOUND = 0.05, 0.10


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run. `source` says where the figures are from; peak_gib may be unknown."""

    gpus: int
    run: str
    step_ms: float
    peak_gib: float | None
    source: str


@dataclass(frozen=True)
class Compared:
    """A run beside its prediction; errors are shares of what was measured."""

    run: MeasuredRun
    step_ms: float
    peak_gib: float

    @property
    def time_error(self) -> float:
        return self.step_ms / self.run.step_ms - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.run.peak_gib
        return None if measured is None else self.peak_gib / measured - 1


@dataclass(frozen=True)
class CompiledRun:
    """A step that was compiled without a GPU: XLA's plan of its memory, and the prediction."""

    gpus: int
    run: str
    gib: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.gib - 1


def _committed() -> dict:
    return json.loads((resources.files("jaxpar.planning") / "calibration.json").read_text("utf-8"))


def measured_runs() -> list[MeasuredRun]:
    """The committed runs."""
    return [MeasuredRun(**row) for row in _committed()["rows"]]


def conditions() -> str:
    """What all of them share."""
    return _committed()["conditions"]


def compare(read: Callable[[list[str]], Config]) -> Iterator[Compared]:
    """Predict each run.

    Args:     read: a command line's config, checked (`command_line.read_config`).
    """
    for run in measured_runs():
        layout = _predicted(run.run, run.gpus, read)
        yield Compared(run, layout.time.total * 1e3, layout.memory.total / GIB)


def compare_compiled(read: Callable[[list[str]], Config]) -> Iterator[CompiledRun]:
    """Predict the memory of each compiled step. Args: as `compare`."""
    for row in _committed()["compiled"]:
        layout = _predicted(row["run"], row["gpus"], read)
        yield CompiledRun(**row, predicted=layout.memory.total / GIB)


def _predicted(run: str, gpus: int, read: Callable[[list[str]], Config]) -> Layout:
    cfg = resolve(read(run.split()), gpus)
    return predict(cfg, Cluster(H200, NETWORKS["ib400"], gpus, H200.per_host))
