"""The flight recorder, RUN/recent.jsonl: inputs and exact results of the latest steps.

When the file holds more than twice `guard.recent_steps` records, the older ones are dropped. If a
step has two records, the later one counts. `python -m jaxpar.checkpoint replay` repeats a step
from its record.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.runtime.files import atomic, json_lines
from jaxpar.runtime.files.append import FULL, Lines

RECENT_FILE = "recent.jsonl"

_MEASURED = ("loss", "grad_norm")


def bits(value: float) -> str:
    """Return the bits of a float32, in hexadecimal."""
    return f"{np.float32(value).view(np.uint32).item():08x}"


def read_recent(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Read the records by step, counted from 1.

    Skips lines that are damaged or were cut off by a crash: a run can resume without them.
    """
    records = json_lines.read(run_dir / RECENT_FILE)
    return {record["step"]: record for record in records if _is_whole(record)}


def last_recorded(run_dir: Path) -> int:
    """Return the step that the last attempt recorded last; 0 if there is none."""
    records = [one for one in json_lines.read(run_dir / RECENT_FILE) if _is_whole(one)]
    return int(records[-1]["step"]) if records else 0


def values_judged(records: Iterable[dict[str, Any]], name: str = "loss") -> list[float]:
    """Return the values of a metric that its next value is compared with.

    They are those of steps with a finite loss and gradient. Records hold None for non-finite
    values; the update of such a step was skipped.
    """
    kept = [r.get(name) for r in records if all(r.get(of) is not None for of in _MEASURED)]
    return [value for value in kept if isinstance(value, int | float)]


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether a record has all fields that are read of it."""
    measured = (record.get("loss", ""), record.get("grad_norm", ""))  # None: non-finite
    numbers = all(value is None or type(value) in (int, float) for value in measured)
    exact = record.get("bits")
    texts = isinstance(exact, dict) and all(isinstance(exact.get(n), str) for n in _MEASURED)
    return type(record.get("step")) is int and record["step"] > 0 and numbers and texts


class RecentSteps:
    """Writes the records of the flight recorder."""

    def __init__(self, run_dir: Path, size: int):
        """
        Args:     size: minimum number of records to keep; 0: write nothing.
        """
        self._path, self._size = run_dir / RECENT_FILE, size
        self._lines = list(map(json.dumps, read_recent(run_dir).values())) if size else []
        self._rewrite()

    def add(self, step: int, values: dict[str, float], **more: Any) -> None:
        """Append the record of a step.

        Args:     step: counted from 1. values: its metrics. more: its inputs.
        """
        if not self._size:
            return
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        exact = {name: bits(values[name]) for name in ("loss", "grad_norm")}
        self._lines.append(json.dumps({"step": step, **more, **finite, "bits": exact}))
        self._file.write(self._lines[-1] + "\n")
        if len(self._lines) > 2 * self._size:
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file atomically by its latest records, and open it for appending."""
        if not self._size:
            return
        self._lines = self._lines[-self._size :]
        self._path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
        try:
            atomic.write(self._path, "".join(line + "\n" for line in self._lines).encode())
        except OSError as error:
            if error.errno not in FULL:
                raise  # on a full disk, the longer file stays until there is room
        self._file = Lines(self._path)
