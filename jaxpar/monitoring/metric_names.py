"""The table of a run's metrics, RUN/metric_names.json: the group, unit and meaning of each.

The run writes it for the metrics that it records, also those of users' losses and probes, so that
programs that read the run need not import what declares them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from jaxpar.config import declared
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.config.metrics import METRICS, UNKNOWN, Metric, metric_of
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.append import FULL
from jaxpar.runtime.terminal import warn

TABLE_FILE = "metric_names.json"

#: Most metrics of a table.
MAX_METRICS = 10_000

type _Text = Annotated[str, msgspec.Meta(max_length=1000)]


@dataclass(frozen=True)
class Described:
    """What a run says of a metric."""

    group: _Text
    unit: _Text
    meaning: _Text


@dataclass(frozen=True)
class MetricTable:
    """The content of the file."""

    metrics: Annotated[dict[declared.Name, Described], msgspec.Meta(max_length=MAX_METRICS)]


class TableWriter:
    """Writes the table of a run, when it first records a metric."""

    def __init__(self, run_dir: Path | None):
        """Args:     run_dir: with the table of earlier starts, if any. None: writes nothing."""
        self._path = None if run_dir is None else run_dir / TABLE_FILE
        self._written = {} if run_dir is None else _read(run_dir)

    def add(self, names: Iterable[str]) -> None:
        """Write what is known of some metrics, unless the file has it.

        Raises:   OSError, except those in FULL: then it is tried again with the next record.
        """
        known = {name: metric_of(name) for name in names if metric_of(name) is not UNKNOWN}
        found = {name: Described(m.group, m.unit, m.meaning) for name, m in known.items()}
        if self._path is None or (found.items() <= self._written.items() and self._path.is_file()):
            return
        whole = self._written | found
        text = declared.to_json(MetricTable(whole), indent=1) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
            atomic.write(self._path, text.encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            return
        self._written = whole


def read_table(run_dir: Path) -> dict[str, Metric]:
    """Return what is known of a run's metrics. Without a table: those that every run may have."""
    of_run = {n: Metric(d.group, d.unit, d.meaning) for n, d in _read(run_dir).items()}
    return METRICS | of_run


def _read(run_dir: Path) -> dict[str, Described]:
    path = run_dir / TABLE_FILE
    try:
        return declared.read(MetricTable, path).metrics if path.is_file() else {}
    except UnreadableJson as error:
        warn(f"{path} is not used: {error}")
        return {}


def tag(name: str) -> str:
    """Return a metric's name in TensorBoard and W&B: GROUP/NAME. Args:     as `metric_of`."""
    return f"{metric_of(name).group}/{name}"
