"""Reads the loads of a run's experts, RUN/expert_loads.jsonl, in bounded memory."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.monitoring.outline import outline
from jaxpar.monitoring.routing import LOADS_FILE

#: Most columns of the loads over time.
MAX_COLUMNS = 120

#: No expert has more tokens in a step: their sum is finite.
MAX_TOKENS = 1 << 53


@dataclass
class Loads:
    """The loads of a run's experts, relative to the mean of their layer."""

    step: int
    """The last step with a record."""
    last: np.ndarray
    """float64 [layers, E]: at that step."""
    columns: int
    """Number of equal ranges of the steps up to the last."""
    fullest: dict[int, np.ndarray] = field(default_factory=dict)
    """By range that has a record, float64 [layers]: the largest load of each layer."""

    def over_time(self) -> np.ndarray:
        """Return the largest load of each layer by range of steps, [layers, <= columns].

        A range without a record has the value of the next that has one. Ranges after the last
        record are left out: those of steps whose records are damaged.
        """
        at = sorted(self.fullest)
        by_column = np.searchsorted(at, np.arange(at[-1] + 1))
        return np.stack([self.fullest[column] for column in at], axis=1)[:, by_column]


def read_loads(folder: Path) -> Loads | None:
    """Read the loads of a run. None if it has none."""
    records = outline(folder / LOADS_FILE)
    loads: Loads | None = None
    for record in records.records():
        rows = _rows(record.get("loads"))
        if rows is None or not record.get("step"):
            continue
        relative = rows / np.maximum(rows.mean(axis=1, keepdims=True), 1e-9)
        if loads is None or loads.last.shape != relative.shape:
            loads = Loads(0, relative, min(records.last_step, MAX_COLUMNS))
        loads.step, loads.last = record["step"], relative
        column = (record["step"] - 1) * loads.columns // records.last_step
        before = loads.fullest.get(column, 0.0)
        loads.fullest[column] = np.maximum(before, relative.max(axis=1))
    return loads


def _rows(value: Any) -> np.ndarray | None:
    """Return the loads of a record, [layers, E]; None if they are damaged."""
    try:
        rows = np.array(value, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    good = rows.ndim == 2 and rows.size and ((rows >= 0) & (rows <= MAX_TOKENS)).all()
    return rows if good else None
