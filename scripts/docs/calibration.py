"""Compares predictions with measured runs: dense models on H200s, experts on H100s and H200s.

`calibration.json` has the runs with their command lines. No constant of `prediction/rates.py`
is fitted to a single run. The file also has XLA's memory analysis of compiled steps.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB, GPUS, H200, NETWORKS, Gpu
from jaxpar.prediction.ranking import Layout, predict

#: The lists of runs in the file.
type Runs = Literal["rows", "experts"]

#: Largest accepted errors of a prediction, relative to the measurement.
MEMORY_BOUND, TIME_BOUND = 0.05, 0.10


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run. `source` names the origin of the figures; peak_gib may be unknown.

    gpu   as in `hardware.GPUS`.
    """

    gpus: int
    run: str
    step_ms: float
    peak_gib: float | None
    source: str
    gpu: str = "h200"


@dataclass(frozen=True)
class Compared:
    """A run and its prediction. Errors are relative to the measurement."""

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
    """A step compiled without a GPU: XLA's memory analysis and the prediction."""

    gpus: int
    run: str
    gib: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.gib - 1


def _committed() -> dict:
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def measured_runs(of: Runs = "rows") -> list[MeasuredRun]:
    """Return the committed runs of dense models ("rows"), or of models with experts."""
    return [MeasuredRun(**row) for row in _committed()[of]]


def conditions() -> str:
    """Return the conditions shared by all runs of dense models."""
    return _committed()["conditions"]


def compare(read: Callable[[list[str]], Config], of: Runs = "rows") -> Iterator[Compared]:
    """Predict each run.

    Args:     read: parses and checks a command line (`command_line.read_config`). of: as in
              `measured_runs`.
    """
    for run in measured_runs(of):
        layout = _predicted(run.run, run.gpus, read, GPUS[run.gpu])
        yield Compared(run, layout.time.total * 1e3, layout.memory.total / GIB)


def compare_compiled(read: Callable[[list[str]], Config]) -> Iterator[CompiledRun]:
    """Predict the memory of each compiled step.

    Args:     read: as in `compare`.
    """
    for row in _committed()["compiled"]:
        layout = _predicted(row["run"], row["gpus"], read)
        yield CompiledRun(**row, predicted=layout.memory.total / GIB)


def _predicted(run: str, gpus: int, read: Callable[[list[str]], Config], gpu: Gpu = H200) -> Layout:
    cfg = resolve(read(run.split()), gpus)
    return predict(cfg, Cluster(gpu, NETWORKS["ib400"], gpus, gpu.per_host))
