"""Records of experts: how many tokens each had, and which tokens.

RUN/expert_loads.jsonl has the loads of all experts, for the report's heat maps. A line has the
tokens of each expert in a step, by layer: {"step": 10, "loads": [[3, 5], [4, 4]]}. The first row is
the first layer with experts. As in metrics.jsonl, a resumed run begins with
{"resumed_after_step": 10}, and if a step has two records, the later one counts.

RUN/routing/step_00000100.npz has the experts of each token of a step: a compressed npz of three
arrays:

    experts      uint8 or uint16 [B, T, layers with experts, k]: expert indices, tokens in the order
                 of the text
    step         the step, counted from 1
    num_experts  the number of experts of a layer
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.components.experts import experts_in, num_experts
from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.recorded_steps import MAX_BYTES
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.append import Lines

FOLDER = "routing"


def file_of(step: int) -> str:
    """Return the name of a step's file in the run folder."""
    return f"{FOLDER}/step_{step:08d}.npz"


class RoutingWriter:
    """Writes the routing of the steps that `run.record_routing` names, in process 0."""

    def __init__(self, cfg: Config, run_dir: Path, order: Callable[[int], np.ndarray | None]):
        """
        Args:     order: as of `Loader`: column t of a batch holds text position order(T)[t].
        """
        self._steps, self._order = frozenset(cfg.run.record_routing), order
        self._dir, self._experts = run_dir, num_experts(cfg.model)

    def write(self, step: int, routing: jax.Array | None) -> bool:
        """Fetch and write the routing of a step, if it is due. Returns whether it was.

        Args:     step: counted from 1. routing: the metric "routing".
        """
        if routing is None or step not in self._steps:
            return False
        if jax.process_index() == 0:
            order = self._order(routing.shape[1])
            experts = in_text_order(np.asarray(jax.device_get(routing)), order)
            path = self._dir / file_of(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez_compressed(content, experts=experts, step=step, num_experts=self._experts)
            atomic.write(path, content.getvalue())
        return True


def in_text_order(experts: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Undo the order in which a mesh stores tokens along dim 1."""
    return experts if order is None else experts[:, np.argsort(order)]


@dataclass(frozen=True)
class RecordedRouting:
    """A recorded routing."""

    experts: np.ndarray
    """As in its file."""
    step: int
    sha256: str
    """Of the file."""

    def __str__(self) -> str:
        return f"replayed: {self.sha256[:12]}, step {self.step}"


def read_routing(option: str, path: str, cfg: Config) -> RecordedRouting:
    """Read a file of `RoutingWriter`, and check that it fits a config.

    Args:     option: names the file on the command line.
    Raises:   ConfigError that names the option.
    """
    fix = "use a file that a run with --run.record-routing wrote, RUN/routing/step_00000001.npz"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(option, path, f"cannot be read: {error.strerror}", fix) from error
    try:
        arrays = _arrays(content)
        experts, step, of = arrays["experts"], int(arrays["step"]), int(arrays["num_experts"])
        if experts.ndim != 4 or experts.dtype not in (np.uint8, np.uint16) or not experts.size:
            raise ValueError("experts")
    except Exception as error:  # damaged archives make zipfile, zlib and NumPy raise many kinds
        raise ConfigError(option, path, "is not a recorded routing", fix) from error
    _check_fits(option, path, experts, of, cfg)
    return RecordedRouting(experts, step, hashlib.sha256(content).hexdigest())


def _arrays(content: bytes) -> Mapping[str, Any]:
    """Raises:   ValueError for an archive that is larger than any recorded routing."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES + (1 << 20):
            raise ValueError("size")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in ("experts", "step", "num_experts")}


def _check_fits(option: str, path: str, experts: np.ndarray, of: int, cfg: Config) -> None:
    m, of_layers = cfg.model, experts_in(cfg.model)
    B, T, layers, k = experts.shape
    # A model without experts differs in their number alone.
    per_token = of_layers[0].experts_per_token if of_layers else k
    dense = m.num_layers - (len(of_layers) or layers)
    at = "model.*.feed_forward"
    fields = {
        "train.global_batch_size": cfg.train.global_batch_size,
        "data.seq_len": cfg.data.seq_len,
        "model.num_layers": m.num_layers,
        f"{at}.experts_per_token": per_token,
        f"{at}.num_experts": num_experts(m),
    }
    recorded = dict(zip(fields, (B, T, layers + dense, k, of), strict=True))
    wrong = [name for name in fields if fields[name] != recorded[name]]
    if wrong:
        here = ", ".join(f"{name} {recorded[name]}" for name in wrong)
        there = ", ".join(f"{fields[name]}" for name in wrong)
        flags = " ".join(f"--{name.replace('_', '-')} {recorded[name]}" for name in wrong)
        # Layers without experts have no field that could be set.
        fix = f"use {flags}" if of_layers else f"use a model with {of} experts"
        raise ConfigError(option, path, f"was recorded with {here}, not {there}", fix)
    if int(experts.max()) >= of:
        rule = f"has expert {int(experts.max())}, but was recorded with {of} experts"
        raise ConfigError(option, path, rule, "use another file: this one is damaged")


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
        if num_experts(cfg.model) and not cfg.lora and jax.process_index() == 0:
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
