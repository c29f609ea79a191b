"""Writes a run's metrics: to `metrics.jsonl`, and as lines on the console.

The metrics of a step are fetched after the next step has been dispatched, so logging never stalls
the device. The time between two fetches is the step time.
"""

import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxpar.config import Config, LoraConfig, Model, value_of
from jaxpar.config.lists.step_sizes import StepSize, StepSizes, step_sizes
from jaxpar.config.lists.weight_schedules import MTP_LOSS, Z_LOSS, weight_at
from jaxpar.config.metrics import metric_of
from jaxpar.model.flops import train_flops_per_token
from jaxpar.monitoring import evaluations
from jaxpar.monitoring.gpus import GpuReader
from jaxpar.monitoring.metric_names import TableWriter
from jaxpar.monitoring.routing import LoadsWriter, RoutingWriter
from jaxpar.monitoring.sinks import Sinks
from jaxpar.prediction.startup import Forecast
from jaxpar.runtime import exit_codes, stages, terminal
from jaxpar.runtime.files.append import Lines
from jaxpar.runtime.gpus.peaks import peak_flops
from jaxpar.runtime.processes import peers
from jaxpar.runtime.units import duration

#: Schedules of weights, and the metrics that show them.
WEIGHTS = {Z_LOSS: "z_loss_weight", MTP_LOSS: "mtp_loss_weight"}


class MetricsWriter:
    """Collects the metrics of each step, and writes a record every `train.log_every` steps.

    Use as a context manager. Process 0 writes RUN/metrics.jsonl, with one JSON object per line. A
    resumed run appends to it: if a step has two records, the later one counts.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        first_step: int,
        schedule: Callable[[int], float],
        epochs: Callable[[int], dict[str, float]] | None = None,
        look: Callable[[int, dict[str, Any]], None] = lambda step, values: None,
        forecast: Forecast | None = None,
        sinks: Sinks | None = None,
        order: Callable[[int], np.ndarray | None] = lambda length: None,
        sizes: StepSizes | None = None,
    ):
        """Open metrics.jsonl for appending.

        Args:     epochs: returns the passes over each source after a step; recorded for mixtures.
                  look: called with every step and its metrics, numbers and arrays, as they
                  arrive; it may raise.
                  forecast: logged at the start, and compared with the measurement at the end.
                  sinks: receive all records; closed at the end. order: of tokens in a batch, for
                  the recorded routing, by the length of a sequence. sizes: of the steps; by default
                  those of the config.
        """
        self.look, self.forecast, self.sinks = look, forecast, sinks
        #: Reads the power, clocks and errors of this process's GPUs; None: not recorded.
        self.gpus: GpuReader | None = None
        #: Returns more metrics for each record, such as what waits for a store.
        self.more: Callable[[], dict[str, float]] = lambda: {}
        self.epochs = epochs if cfg.data.mixture else None
        self.cfg, self.schedule, self.sizes = cfg, schedule, sizes or step_sizes(cfg)
        path = run_dir / "metrics.jsonl" if jax.process_index() == 0 else Path(os.devnull)
        self.file = Lines(path)
        self.table = TableWriter(run_dir if jax.process_index() == 0 else None)
        self.loads = LoadsWriter(cfg, run_dir, first_step)
        self.routing = RoutingWriter(cfg, run_dir, order)
        self.devices = jax.device_count()
        self.device_kind = jax.devices()[0].device_kind
        self.pending: tuple[int, Any] | None = None
        #: More values for the record of the pending step, which are not checked.
        self.added: Mapping[str, Any] = {}
        self.clock: float | None = None
        #: Seconds of a step, for the live line.
        self.pace: float | None = None
        self._clear()
        if first_step:
            self.write({"resumed_after_step": first_step})
        if forecast is not None:
            self.write(forecast.record())
            peers.log(str(forecast))

    def _clear(self) -> None:
        self.seconds, self.steps, self.data_wait, self.device_wait = 0.0, 0, 0.0, 0.0

    def write_previous(
        self, step: int, measured: Any, data_wait: float, dispatch: float = 0.0
    ) -> None:
        """Take the metrics of a step just dispatched; fetch and count the step before it.

        Args:     data_wait, dispatch: seconds that this step waited for its batch, and that its
                  dispatch took, which may include waiting for the devices.
        """
        if self.clock is not None:
            self.device_wait += dispatch
        try:
            self.flush()
        finally:  # if the run saves before it ends, this step is checked too
            self.pending, self.added = (step, measured), {}
        self.data_wait += data_wait

    def flush(self) -> None:
        """Wait for the pending step and count it. Raises what `look` raises."""
        if self.pending is None:
            return
        step, measured = self.pending
        self.pending = None
        there = dict(measured)
        expert_rows, routing = (there.pop(name, None) for name in ("expert_rows", "routing"))
        began = time.monotonic()
        fetched = jax.device_get(there)
        values = {name: float(v) for name, v in fetched.items() if np.ndim(v) == 0}
        self.lists = {name: v for name, v in fetched.items() if np.ndim(v)}
        added = _in_json(self.added)
        waited = time.monotonic() - began
        self.look(step, values | self.lists)
        now = time.perf_counter()
        if self.sizes.at(step) != self.sizes.at(max(step - 1, 0)):
            self._clear()  # the times of a record are of steps of one size
        if self.clock is not None:  # the time of the first step is not a step time
            self.seconds, self.steps = self.seconds + now - self.clock, self.steps + 1
            self.device_wait += waited
        self.clock = now
        self._show_progress(step, values)
        if (step + 1) % self.cfg.train.log_every == 0 or step + 1 == self.cfg.train.num_steps:
            self._write_interval(step, values, added)
            self.loads.write(step + 1, expert_rows)
        if self.routing.write(step + 1, routing):
            self.clock = None  # it took time that is not the next step's

    def _show_progress(self, step: int, values: dict[str, float]) -> None:
        """Show a step in the live line, if there is a terminal."""
        if terminal.screen() is None:
            return
        if self.steps:
            self.pace = self.seconds / self.steps
        parts = [f"step {step + 1}/{self.cfg.train.num_steps}"]
        parts.append(f"loss {_shown(_finite(values['loss']), '.4f')}")
        if self.pace is not None:
            rate = self.sizes.at(step).tokens / self.pace / self.devices
            left = duration(self._steps_left(step) * self.pace)
            parts += [f"{rate:,.0f} tok/s/device", f"ETA {left}"]
        stages.count(step + 1, self.cfg.train.num_steps, "   ".join(parts))

    def pause(self) -> None:
        """Exclude the time until the next step from the step times (evaluation, saving)."""
        self.flush()
        self.clock = None

    def _write_interval(
        self, step: int, values: dict[str, float], added: Mapping[str, Any]
    ) -> None:
        left_out = bool(exit_codes.not_finite(values))
        # Skipped updates do not advance the schedule.
        updates = step - int(values.get("skipped", 0)) + left_out
        record: dict[str, Any] = {
            "step": step + 1,
            "learning_rate": self.schedule(updates),
            **_for_record(values, self.cfg),
            **_in_json(self.lists),
            **added,
        }
        record["tokens_seen"] = self.sizes.tokens_before(step + 1)
        size = self.sizes.at(step)
        if len(self.sizes.sizes) > 1:
            record |= {"global_batch_size": size.rows, "seq_len": size.length}
        record |= {
            metric: weight_at(self.cfg, path, step)
            for path, metric in WEIGHTS.items()
            if value_of(self.cfg, path)
        }
        if self.steps:
            record |= self._speed(size)
            record |= compare_hosts((self.seconds - self.device_wait) / self.steps)
        if self.epochs is not None:
            record["epochs"] = self.epochs(step + 1)
        if self.gpus is not None:
            here = jax.local_device_count() / self.devices
            rate = record.get("tokens_per_second")
            record |= self.gpus.metrics(None if rate is None else rate * here)
        record |= self.more()
        record["memory_gib"] = peak_memory_gib()
        self._clear()
        self.write(record)
        peers.log(step_line(record, self.cfg.train.num_steps, self._steps_left(step)))
        if remark := remark_on_hosts(record):
            peers.log(remark)
        if self.forecast is not None and step + 1 == self.cfg.train.num_steps:
            peers.log(self.forecast.beside(record))

    def _steps_left(self, step: int) -> float:
        """Return the steps after this one, counted in steps of its size by their FLOPs."""
        left = self.sizes.until(self.cfg.train.num_steps, step + 1)
        return sum(self._flops(size) * n for size, n in left) / self._flops(self.sizes.at(step))

    def _flops(self, size: StepSize) -> float:
        if len(self.sizes.sizes) == 1:
            return 1.0
        per_token = train_flops_per_token(self.cfg.model, size.length, lora=self.cfg.lora)
        return size.tokens * per_token

    def _speed(self, size: StepSize) -> dict[str, float]:
        seconds = self.seconds / self.steps
        rate = size.tokens / seconds
        share = lambda causal: mfu(  # noqa: E731
            rate / self.devices,
            self.cfg.model,
            size.length,
            self.device_kind,
            causal=causal,
            lora=self.cfg.lora,
        )
        speed = {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.devices,
            "data_wait_seconds": self.data_wait / self.steps,
            "mfu": share(True),
            "mfu_full_attention": share(False),
        }
        return {name: value for name, value in speed.items() if value is not None}

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl, and pass it to the sinks.

        The file has the epochs of sources without their names, which may be long and many.
        """
        short = [float(f"{passes:.5g}") for passes in record.get("epochs", {}).values()]
        self.file.write(json.dumps(record | ({"epochs": short} if short else {})) + "\n")
        self.table.add(record)
        if self.sinks is not None:
            self.sinks.write(record)

    def evaluation(
        self,
        step: int,
        scores: Mapping[str, evaluations.Score],
        added: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record and print held-out losses.

        Args:     scores: by name, as `evaluations.record_of`. added: more values for the record.
        """
        self.write({"step": step} | evaluations.record_of(scores) | _in_json(added))
        for line in evaluations.lines(scores):
            peers.log(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.loads.close()
        if self.gpus is not None:
            self.gpus.__exit__()
        if self.sinks is not None:
            self.sinks.close()


def peak_memory_gib() -> float:
    """Return the peak memory so far: of the fullest local device, or of the process on a CPU."""
    stats = [d.memory_stats() or {} for d in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    if not peak:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak / 2**30


def step_line(record: dict[str, Any], num_steps: int, left: float | None) -> str:
    """Format a record as one line for the console.

    Args:     left: steps after it, for the ETA. None: without an ETA.
    """
    width = len(str(num_steps))
    parts = [
        f"step {record['step']:>{width}}/{num_steps}",
        f"loss {_shown(record['loss'], '.4f')}",
        f"lr {record['learning_rate']:.2e}",
        f"grad norm {_shown(record['grad_norm'], '.3f')}",
    ]
    if "reward_accuracy" in record:
        parts.append(f"accuracy {_shown(record['reward_accuracy'], '.3f')}")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    if "global_batch_size" in record:
        parts.append(f"batch {record['global_batch_size']:,} x {record['seq_len']:,}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second_per_device']:,.0f} tok/s/device")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"{record['memory_gib']:.1f} GiB")
    if left is not None and "step_seconds" in record:
        parts.append(f"ETA {duration(left * record['step_seconds'])}")
    return "   ".join(parts)


def _for_record(values: dict[str, float], cfg: Config) -> dict[str, float | int | None]:
    """Return a step's metrics as in metrics.jsonl, with null for non-finite values."""
    hidden = {"never"} if cfg.compute.dtype == "float16" else {"never", "float16"}
    shown = {k: v for k, v in values.items() if metric_of(k).shown not in hidden}
    finite = {k: v if math.isfinite(v) else None for k, v in shown.items()}
    return finite | {k: int(v) for k, v in shown.items() if metric_of(k).whole}


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and arrays as in metrics.jsonl, with null for non-finite values."""
    return {name: _finite(np.asarray(x).tolist()) for name, x in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float | None, form: str) -> str:
    return "non-finite" if value is None else format(value, form)


def mfu(
    tokens_per_second: float,
    model: Model,
    seq_len: int,
    device_kind: str,
    *,
    causal: bool,
    lora: LoraConfig | None = None,
) -> float | None:
    """Compute the share of a device's peak FLOP/s from its tokens per second.

    Returns:  None when the peak is unknown.
    """
    peak = peak_flops(device_kind)
    if peak is None:
        return None
    flops = train_flops_per_token(model, seq_len, causal=causal, lora=lora)
    return tokens_per_second * flops / peak


_TOPIC = "timing"


def compare_hosts(host_seconds: float) -> dict[str, Any]:
    """Publish this process's host time per step, and compare; once per logged interval.

    Args:     host_seconds: of one step, without dispatch and waiting for the devices.
    Returns:  in process 0 of several, fields for the record of the interval; otherwise empty. A
              process that lags behind counts with its previous interval.
    """
    if peers.world_size() == 1:
        return {}
    peers.publish(_TOPIC, json.dumps(host_seconds))
    if peers.rank() != 0:
        return {}
    times = {i: json.loads(text) for i, text in peers.read_published(_TOPIC).items()}
    if len(times) < peers.world_size():
        return {}  # some process has not reached its first interval yet
    slowest = max(times, key=lambda i: times[i])
    return {
        "host_seconds_median": statistics.median_low(times.values()),
        "host_seconds_slowest": times[slowest],
        "slowest": peers.process_name(slowest),
    }


def remark_on_hosts(record: dict[str, Any]) -> str | None:
    """Warn of a process whose host time exceeds a fifth of the step and twice the median."""
    slow, usual = record.get("host_seconds_slowest", 0.0), record.get("host_seconds_median", 0.0)
    if slow < 0.2 * record.get("step_seconds", float("inf")) or slow < 2 * usual:
        return None
    return f"{record['slowest']} is slow: {slow:.3f} s of host time per step, median {usual:.3f} s"
