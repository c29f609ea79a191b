"""Metrics for Weights & Biases."""

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.monitoring.metric_names import tag
from jaxpar.runtime.files import json_lines

#: Seconds that a run waits, at its start for somebody to log in, at its end for the upload; what is
#: not sent by then stays in RUN/wandb, for `wandb sync`. W&B's own limits are none.
PATIENCE = 60.0


class WeightsAndBiases:
    """One W&B run for all starts of a run. WANDB_MODE=offline writes to RUN/wandb alone.

    W&B cannot take a step back: one that is taken again, after a resume or a rewind, is kept as it
    was the first time.
    """

    def __init__(self, project: str, run_dir: Path, about: Mapping[str, Any]):
        """Begin, or go on with, the run whose id lies in RUN/wandb/id.

        Args:     project: PROJECT or ENTITY/PROJECT. about: the config.
        """
        import wandb

        self._wandb = wandb
        entity, _, name = project.rpartition("/")
        _wait_for_a_new_second(run_dir / "wandb")
        file = run_dir / "wandb" / "id"
        self._known = _last_step(run_dir) if file.is_file() else 0  # a new one has no step
        self._run = wandb.init(
            entity=entity or None,
            project=name,
            id=_id(file),
            name=run_dir.name,
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
        """Log the numbers of a step, unless an earlier start has logged it."""
        if step > self._known:
            self._run.log({tag(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Hand over what is left; online, this waits for it to be sent."""
        self._run.finish()
        # Its process may still hold what is to be in the file, and ours ends without exit hooks.
        self._wandb.teardown()


def _wait_for_a_new_second(folder: Path) -> None:
    """W&B names a start's folder by second and id: one in the same second would be overwritten."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def _id(path: Path) -> str:
    """The id in a file, which is made if it is not there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text("utf-8").strip()


def _last_step(run_dir: Path) -> int:
    """The highest step that metrics.jsonl has; 0 for none."""
    records = json_lines.read(run_dir / "metrics.jsonl")
    return max((int(record["step"]) for record in records if "step" in record), default=0)
