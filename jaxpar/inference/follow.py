"""Evaluates the checkpoints of a run while it trains, in another process: one after another.

Results go to RUN/evaluations, which is laid out as a run's folder: metrics.jsonl, and the files of
the sinks that the run has. A follower that is started again continues where it stopped.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import best
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import read_saved, saved_config, saved_steps
from jaxpar.config import Config, ConfigError, replace
from jaxpar.monitoring.sinks import Sinks, open_sinks, require_packages
from jaxpar.runtime.files import json_lines
from jaxpar.runtime.files.append import Lines
from jaxpar.runtime.processes import peers

#: Folder of a run for the results of followers.
FOLDER = "evaluations"

#: Seconds between two looks for checkpoints.
POLL_SECONDS = 10.0

type Evaluate = Callable[[int], Mapping[str, Any]]
"""Evaluates the checkpoint of a step. Returns what `record_of` takes."""


def follow(
    run: str, evaluate: Evaluate, log: Callable[[str], None], poll: float = POLL_SECONDS
) -> None:
    """Evaluate each checkpoint of a run as it appears, until the run has ended.

    Args:     poll: seconds between two looks.
    Raises:   ConfigError when the folder has no checkpoint; what `evaluate` raises, except for
              checkpoints that are damaged, or that the run deletes meanwhile.
    """
    if not saved_steps(run):
        rule, fix = "contains no checkpoint yet", "start the follower when the run has saved one"
        raise ConfigError("RUN", run, rule, fix)
    place = Path(run) / FOLDER
    known = {record["step"] for record in json_lines.read(place / "metrics.jsonl")}
    cfg = saved_config(run)
    with _Records(cfg, place, max(known, default=0), log) as records:
        while True:
            waiting = [step for step in saved_steps(run) if step not in known]
            for step in waiting:
                known.add(step)
                if (results := _evaluated(run, step, evaluate, log)) is not None:
                    records.write(step, results)
            if not waiting:
                if _has_ended(run):
                    log(f"done: {run} has ended, and its checkpoints are evaluated")
                    return
                time.sleep(poll)


def _evaluated(
    run: str, step: int, evaluate: Evaluate, log: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Return the results of a checkpoint; None if it is damaged, or is deleted meanwhile."""
    log(f"step {step}")
    try:
        return evaluate(step)
    except Damaged as error:
        log(f"left out   {error}")
    except (ConfigError, OSError):
        if step in saved_steps(run):
            raise
        log(f"left out   step {step}: the run has deleted it")
    return None


def _has_ended(run: str) -> bool:
    """Whether the run has saved its last step, or has stopped early."""
    steps = saved_steps(run)
    try:
        saved = read_saved(run, steps[-1])
    except (ConfigError, Damaged, IndexError):
        return False
    train, found = saved.config["train"], best.of(saved)
    patience = train.get("early_stop_patience", 0)
    return saved.step >= train["num_steps"] or (found is not None and 0 < patience <= found.stale)


class _Records:
    """Writes results as a run writes its metrics."""

    def __init__(self, cfg: Config, place: Path, last: int, log: Callable[[str], None]):
        cfg = replace(cfg, **{"metrics.prometheus_port": 0})  # which the run itself uses
        require_packages(cfg)
        self._open = contextlib.ExitStack()
        name = f"{Path(cfg.run.dir).name}-{FOLDER}"
        self._sinks: Sinks = open_sinks(cfg, place, last, log, name)
        self._open.callback(self._sinks.close)
        if peers.rank() == 0:
            self._file = self._open.enter_context(
                contextlib.closing(Lines(place / "metrics.jsonl"))
            )

    def write(self, step: int, results: Mapping[str, Any]) -> None:
        """Append the results of a checkpoint, and pass them to the sinks."""
        record = {"step": step} | record_of(results)
        if peers.rank() == 0:
            self._file.write(json.dumps(record) + "\n")
        self._sinks.write(record)

    def __enter__(self) -> "_Records":
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()


def record_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record.

    Args:     results: of `evaluate.evaluate`: those of the harness, and "text_loss".
    """
    record: dict[str, Any] = {}
    if text := results.get("text_loss"):
        record["followed_loss"] = text["loss"]
        if text["bits_per_byte"] is not None:
            record["followed_bits_per_byte"] = text["bits_per_byte"]
    scores = {task: _numbers(found) for task, found in results.get("results", {}).items()}
    return record | ({"task_scores": scores} if scores else {})


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a task by name, without their standard errors.

    The harness names them METRIC,FILTER; the filter "none" is left out.
    """
    scores = {}
    for name, value in found.items():
        metric, comma, kept = name.partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            scores[metric if kept == "none" else f"{metric}_{kept}"] = float(value)
    return scores
