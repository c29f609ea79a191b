"""Metrics for Weights & Biases."""

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.monitoring.metric_names import tag
from jaxpar.runtime.files import atomic, json_lines

#: Seconds that a run waits for a login at its start, and for the upload at its end. Data not sent
#: by then stays in RUN/wandb, for `wandb sync`. By default, W&B waits without limit.
PATIENCE = 60.0


class WeightsAndBiases:
    """One W&B run for all starts of a run. WANDB_MODE=offline writes only to RUN/wandb.

    W&B cannot go back in steps. If a step is repeated after a resume or a rewind, W&B keeps its
    first values.
    """

    def __init__(self, project: str, run_dir: Path, about: Mapping[str, Any], name: str = ""):
        """Start or resume the W&B run whose id is in RUN/wandb/id.

        Args:     project: PROJECT or ENTITY/PROJECT. about: the config. name: of the run. Empty:
                  that of its folder.
        """
        import wandb

        self._wandb = wandb
        entity, _, place = project.rpartition("/")
        _wait_for_a_new_second(run_dir / "wandb")
        file = run_dir / "wandb" / "id"
        self._known = _last_step(run_dir) if file.is_file() else 0  # a new run has no steps
        self._run = wandb.init(
            entity=entity or None,
            project=place,
            id=_id(file),
            name=name or run_dir.name,
            dir=str(run_dir),
            config=dict(about),
            resume="allow",
            settings=wandb.Settings(
                console="off",
                login_timeout=PATIENCE,
                finish_timeout=PATIENCE,
                finish_timeout_raises=True,
            ),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, unless an earlier start has logged it."""
        if step > self._known:
            self._run.log({tag(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run. Online, this waits for the upload."""
        self._run.finish()
        # W&B's process may still hold data for the file, and this one ends without exit hooks.
        self._wandb.teardown()


def _wait_for_a_new_second(folder: Path) -> None:
    """Wait until the name of the folder is new: W&B names it by second and id."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def _id(path: Path) -> str:
    """Read the id in a file, which is created with a new id if missing."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, f"{uuid.uuid4().hex[:12]}\n".encode())
    return path.read_text("utf-8").strip()


def _last_step(run_dir: Path) -> int:
    """Return the highest step in metrics.jsonl; 0 if there is none."""
    records = json_lines.read(run_dir / "metrics.jsonl")
    return max((int(record["step"]) for record in records if "step" in record), default=0)
