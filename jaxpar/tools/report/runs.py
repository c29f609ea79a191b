"""Reads a run's folder for a report: metrics in bounded memory, and events."""

import functools
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.fields import optional_sections
from jaxpar.config.json_reader import read_json
from jaxpar.config.metrics import METRICS, UNKNOWN, Metric
from jaxpar.config.schema.items import EvaluationSet
from jaxpar.config.schema.optimizer import AVERAGED
from jaxpar.monitoring.certificate import CERTIFICATE_FILE
from jaxpar.monitoring.goodput import (
    Goodput,
    RestartCosts,
    gap_before,
    goodput,
    read_events,
    restarts,
)
from jaxpar.monitoring.metric_names import read_table
from jaxpar.monitoring.outline import MAX_STEPS, Outline, outline
from jaxpar.monitoring.routing import LOADS_FILE
from jaxpar.monitoring.samples import read_samples
from jaxpar.monitoring.sinks import numbers
from jaxpar.runtime.files import json_lines
from jaxpar.tools.report import layers
from jaxpar.tools.report.layers import LayerMap
from jaxpar.tools.report.series import Series, Speed, can_be_shown

# ------------------------------- Reads the loads of a run's experts, LOADS_FILE, in bounded memory


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


#: Kinds of marks on the axes of steps and time, and their meaning.
KINDS = {
    "restart": "restart",
    "rewind": "rewind to an earlier checkpoint",
    "skipped": "updates skipped because of a non-finite loss or gradient",
    "failed": "save failed",
    "saved": "checkpoint",
}

#: The moving average covers this share of all values.
SMOOTH = 1 / 50

#: Metrics that are kept over steps. Of others, only the last value is kept.
DRAWN = frozenset(
    f"""loss held_out_loss {AVERAGED}_loss bits_per_byte grad_norm learning_rate
    tokens_per_second_per_device mfu memory_gib gpu_watts gpu_clock_mhz joules_per_token
    global_batch_size seq_len tokens_seen
    data_wait_seconds store_waiting_gb loss_scale expert_entropy fullest_expert fullest_rank
    fullest_rank_mean further_rounds""".split()
)

#: Begins the names of the losses of `evaluation.sets`, which are kept over steps too.
OF_SETS = "set_loss/"

#: The results of followers, and what their names begin with.
FOLLOWED = Path("evaluations", "metrics.jsonl")
OF_FOLLOWERS = ("task_scores/", "followed_loss", "followed_bits_per_byte")

#: Most metrics that are kept over steps, of which a damaged file may name any number.
MAX_SERIES = len(DRAWN) + EvaluationSet.most

#: A folder of which a report can be made has one of these: the last one before a run starts.
ONE_OF = ("config.json", "metrics.jsonl", CERTIFICATE_FILE)

#: Number of samples that are shown, the latest ones.
MAX_SAMPLES = 4


class Mark(NamedTuple):
    """Something that happened to a run."""

    kind: str
    step: int
    hours: float | None
    """Hours since the run began; None without events.jsonl."""
    text: str


@dataclass
class RunRead:
    """The data of a run that a report shows."""

    name: str
    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    series: dict[str, Series] = field(default_factory=dict)
    speed: Speed = field(default_factory=Speed)
    marks: list[Mark] = field(default_factory=list)
    progress: list[list[tuple[float, int]]] = field(default_factory=list)
    """For each attempt, (hours since the run began, completed steps)."""
    last: dict[str, float] = field(default_factory=dict)
    """The last displayable value of each metric."""
    predicted: dict[str, float] = field(default_factory=dict)
    goodput: Goodput | None = None
    restarts: RestartCosts | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    last_step: int = 0
    last_half: Series | None = None
    """The loss in the second half of the steps, in finer ranges."""
    loads: Loads | None = None
    """Of the experts; None without any."""
    layers: dict[str, LayerMap] = field(default_factory=dict)
    """Metrics of layers, by name."""
    known: Mapping[str, Metric] = field(default_factory=lambda: METRICS)
    """What is known of its metrics."""

    def metric(self, name: str) -> Metric:
        """Return what is known of a metric, whose name may be NAME/SOURCE."""
        return self.known.get(name.partition("/")[0], UNKNOWN)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step; 0 if not recorded."""
        return max(self.last.get("tokens_seen", 0.0), 0.0) / max(self.last_step, 1)

    def tokens_at(self, step: int) -> float:
        """Return the tokens of the first steps, between records on a straight line."""
        if not self.sizes_change:
            return step * self.tokens_per_step
        return float(np.interp(step, *self._tokens_of_steps))

    @property
    def sizes_change(self) -> bool:
        """Whether steps have different numbers of tokens."""
        return "global_batch_size" in self.series

    @functools.cached_property
    def _tokens_of_steps(self) -> tuple[list[int], list[float]]:
        points = self.series["tokens_seen"].points() if "tokens_seen" in self.series else []
        return [0, *(p.step for p in points)], [0.0, *(p.high for p in points)]

    @property
    def num_steps(self) -> int:
        """Steps of the complete run; 0 if the config does not have it."""
        found = self.config.get("train", {}).get("num_steps", 0)
        return found if isinstance(found, int) else 0


def read_run(folder: str) -> RunRead:
    """Read the folder of a run, which may still be in progress.

    Raises:   ConfigError if the folder is not a run's, or a file of it cannot be read.
    """
    try:
        return _read_run(folder)
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        fix = "make it readable for this user, or leave the run out"
        raise ConfigError("RUN", str(error.filename or folder), rule, fix) from error


def is_run(folder: str) -> bool:
    """Return whether a folder has the files of a run."""
    return any((Path(folder) / name).is_file() for name in ONE_OF)


def _read_run(folder: str) -> RunRead:
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError("RUN", folder, what, "give the folder of a run, such as runs/quickstart")
    os.scandir(path).close()  # `is_file` would hide that the folder cannot be read
    if not is_run(folder):
        rule = "is not a run's folder: it has neither config.json nor metrics.jsonl"
        within = sorted(str(file.parent) for file in path.glob("*/metrics.jsonl"))[:3]
        fix = f"use {' or '.join(within)}" if within else "give the folder set by run.dir"
        raise ConfigError("RUN", folder, rule, fix)
    config = _json(path / "config.json")
    for name, section in config.items():
        is_off = section is None and name in optional_sections()
        if not isinstance(section, dict) and not is_off:
            rule, fix = (
                f"is not a valid config: {name} is not a section",
                "restart the run, which rewrites the file",
            )
            raise ConfigError("RUN", str(path / "config.json"), rule, fix)
    run = RunRead(folder, path, config, _json(path / "manifest.json"), known=read_table(path))
    _read_metrics(run, found := outline(path / "metrics.jsonl"))
    _read_followed(run)
    events = read_events(path)
    if events:
        run.goodput, run.restarts = goodput(events), restarts(events)
        _read_events(run, events)
    else:
        starts = (step for _, step in found.starts[1:])
        run.marks += [Mark("restart", step, None, f"resumed after step {step}") for step in starts]
    run.loads = read_loads(path)
    run.samples = list(deque(read_samples(path), MAX_SAMPLES))
    return run


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path, what="it") if path.is_file() else {}
    except ValueError as error:
        fix = "fix it, or restart the run, which rewrites the file"
        raise ConfigError("RUN", str(path), f"cannot be read: {error}", fix) from error
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------- metrics.jsonl


def _read_metrics(run: RunRead, found: Outline) -> None:
    """Read series, histograms and the marks of skipped updates."""
    span, left_out = found.count * SMOOTH, 0
    run.last_step = found.last_step
    half = found.last_step // 2
    run.last_half = Series(half, found.last_step, span)
    for record in found.records():
        values = {name: v for name, v in numbers(record).items() if can_be_shown(v)}
        if then := {k: v for k, v in values.items() if k.startswith("predicted_")}:
            run.predicted = then  # of the latest attempt
        step = record.get("step")
        if not isinstance(step, int):
            continue
        skipped = int(values.get("skipped", left_out))
        if skipped > left_out:
            text = f"{skipped - left_out} updates skipped up to step {step}"
            run.marks.append(Mark("skipped", step, None, text))
        left_out = skipped
        run.last |= values
        layers.read(run.layers, record, found.last_step)
        for name in (name for name in values if name in DRAWN or name.startswith(OF_SETS)):
            if name not in run.series:
                if len(run.series) >= MAX_SERIES:
                    continue
                run.series[name] = Series(0, found.last_step, span)
            run.series[name].add(step, values[name])
        run.speed.add(values, run.predicted)
        if "loss" in values and step > half:
            run.last_half.add(step, values["loss"])


def _read_followed(run: RunRead) -> None:
    """Read the results of followers: of a step that has several, the last one counts."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record in json_lines.read(run.folder / FOLLOWED):
        step = record.get("step")
        if isinstance(step, int) and 0 <= step <= MAX_STEPS:
            for name, value in numbers(record).items():
                if name.startswith(OF_FOLLOWERS) and can_be_shown(value):
                    found[name][step] = value
    for name in list(found)[: EvaluationSet.most]:
        run.series[name] = Series(0, max(run.last_step, *found[name]), 1)
        for step in sorted(found[name]):
            run.series[name].add(step, found[name][step])
        run.last[name] = found[name][max(found[name])]


# ------------------------------------------------------------------------------- events.jsonl


def _read_events(run: RunRead, events: Iterable[dict[str, Any]]) -> None:
    """Read progress and marks over time.

    Times are the ages of the attempts. The wall clock is used only between attempts.
    """
    born = end = 0.0
    last: dict[str, Any] | None = None
    gone_on = False
    for event in events:
        age = float(event["age"])
        if event["event"] == "start":
            born = end + (0.0 if last is None else gap_before(event, last))
            gone_on = False
            run.progress.append([])
        if not run.progress:
            continue  # the start is missing
        end = max(end, born + age)
        hours = (born + age) / 3600
        if event["event"] == "from":
            _gone_on(run, event, hours, within=gone_on)
            gone_on = True
        elif event["event"] == "time" and gone_on:
            run.progress[-1].append((hours, int(event["steps"][1])))
        elif event["event"] == "saved":
            text = f"saved step {event['step']} in {event['seconds']:.1f} s"
            run.marks.append(Mark("saved", int(event["step"]), hours, text))
        elif event["event"] == "save failed":
            text = f"failed to save step {event['step']}: {event['error']}"
            run.marks.append(Mark("failed", int(event["step"]), hours, text))
        last = event


def _gone_on(run: RunRead, event: dict[str, Any], hours: float, *, within: bool) -> None:
    """Add the mark of an attempt that resumes from a step, or of a rewind."""
    step = int(event["step"])
    if within:
        run.marks.append(Mark("rewind", step, hours, f"rewound to step {step}"))
        run.progress.append([])
    elif len(run.progress) > 1:
        text = f"attempt {event['attempt']}, from step {step}"
        run.marks.append(Mark("restart", step, hours, text))
    run.progress[-1].append((hours, step))
