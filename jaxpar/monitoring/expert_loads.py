"""Records the loads of all experts: RUN/expert_loads.jsonl, for the report's heat maps.

A line has the tokens of each expert in a step, by layer: {"step": 10, "loads": [[3, 5], [4, 4]]}.
The first row is the first layer with experts. As in metrics.jsonl, a resumed run begins with
{"resumed_after_step": 10}, and if a step has two records, the later one counts.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.runtime.files.append import Lines

LOADS_FILE = "expert_loads.jsonl"

#: Most records of a run, so that the file stays small. With 48 layers of 128 experts, a record has
#: about 30 kB.
MAX_RECORDS = 1000


class LoadsWriter:
    """Writes the loads of a run's experts at some of the steps that are logged, in process 0."""

    def __init__(self, cfg: Config, run_dir: Path, first_step: int):
        """
        Args:     first_step: steps done so far.
        """
        t = cfg.train
        self._every = t.log_every * -(-t.num_steps // (t.log_every * MAX_RECORDS))
        self._last, self._lines = t.num_steps, None
        if cfg.model.num_experts and not cfg.lora.rank and jax.process_index() == 0:
            self._lines = Lines(run_dir / LOADS_FILE)
            if first_step:
                self._write({"resumed_after_step": first_step})

    def write(self, step: int, rows: jax.Array | None) -> None:
        """Fetch and write the loads of a step, if they are due.

        Args:     step: counted from 1. rows: the metric "expert_rows".
        """
        if self._lines is None or rows is None or (step % self._every and step != self._last):
            return
        loads = np.asarray(jax.device_get(rows)).astype(np.int64).tolist()
        self._write({"step": step, "loads": loads})

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    def _write(self, record: dict[str, Any]) -> None:
        assert self._lines is not None
        self._lines.write(json.dumps(record, separators=(",", ":")) + "\n")
