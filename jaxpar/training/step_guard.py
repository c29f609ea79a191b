"""Checks every step's metrics for non-finite values and spikes, and records them.

After a spike, a run may rewind to the last checkpoint, and skip the batches before it.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.step_sizes import sequences_before
from jaxpar.data.loader import Loader
from jaxpar.data.skips import write_skipped
from jaxpar.monitoring.recent_steps import RecentSteps, read_recent, values_judged
from jaxpar.runtime import exit_codes
from jaxpar.step.state import TrainState
from jaxpar.training import initial_weights

#: Converts a median absolute deviation to the standard deviation of a normal distribution.
MAD_TO_DEVIATION = 1.4826

#: The least deviation, as a share of the median. If the values are nearly equal, rounding would
#: otherwise count as a spike.
MIN_DEVIATION = 0.01


class Window:
    """The latest values of a metric, which decide whether the next one is a spike."""

    def __init__(self, size: int, deviations: float, values: Iterable[float] = ()):
        self._deviations = deviations
        self._values = collections.deque(values, maxlen=size)

    def limit(self) -> float:
        """Return the largest value that is not a spike; infinite until the window is half full."""
        if len(self._values) < (self._values.maxlen or 0) / 2:
            return math.inf
        median = statistics.median(self._values)
        mad = statistics.median(abs(value - median) for value in self._values)
        deviation = max(MAD_TO_DEVIATION * mad, MIN_DEVIATION * abs(median))
        return median + self._deviations * deviation

    def add(self, value: float) -> None:
        """Append a value to the window."""
        self._values.append(value)


def require_recorded(cfg: Config, names: Iterable[str]) -> None:
    """Raises:   ConfigError if a step does not have the metric that is watched for spikes.

    Args:     names: of a step's metrics.
    """
    path, there = "guard.spike_metric", sorted(set(names) - {"expert_rows", "routing", "in_a_row"})
    if cfg.guard.spike != "ignore" and cfg.guard.spike_metric not in there:
        rule = "is no metric of this run's steps"
        fix = f"use one of {', '.join(there)}"
        if cfg.metrics.layers == "none":
            fix += ", or record those of layers: --metrics.layers cheap"
        elif cfg.metrics.layers_every > 1:
            fix += ", or record those of layers at every step: --metrics.layers_every 1"
        raise ConfigError(path, cfg.guard.spike_metric, rule, fix)


def _largest(value: Any) -> tuple[float, str]:
    """Return the value of a metric, of a list its largest, and at which entry that is, in words."""
    values = np.asarray(value, np.float64)
    if not values.ndim or np.isnan(values).all():
        return float(values if not values.ndim else np.nan), ""
    at = np.unravel_index(np.nanargmax(values), values.shape)
    return float(values[at]), f" of layer {at[0]}"


class StepGuard:
    """Checks each step's metrics, in order; warns about bad values, or ends the run."""

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        first_step: int,
        batch_of: Callable[[int], int],
        log: Callable[[str], None],
        mesh: str = "",
    ):
        """
        Args:     first_step: steps done so far. batch_of: returns the batch of a step. log: called
                  with each warning. mesh: for the records.
        """
        self._cfg, self._log, self._batch_of, self._mesh = cfg, log, batch_of, mesh
        g = cfg.guard
        # A resumed run restores its window from the records.
        wanted = g.recent_steps > 0 or g.spike != "ignore"
        size = max(g.recent_steps, g.spike_window) if wanted else 0
        before = _values_before(run_dir, first_step, g.spike_window, g.spike_metric)
        self._recent = RecentSteps(run_dir, size if jax.process_index() == 0 else 0)
        self._window = Window(g.spike_window, g.spike_deviations, before)

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record and check the metrics of a step.

        Args:     step: counted from 0. metrics: numbers and arrays, on the host.
        Raises:   BadNumerics when too many updates in a row were skipped; Spike when the run must
                  rewind.
        """
        number, name = step + 1, self._cfg.guard.spike_metric
        watched, where = _largest(metrics.get(name, np.nan))
        values = {n: v for n, v in metrics.items() if np.ndim(v) == 0}
        if name in metrics:
            values[name] = watched
        batch, seed = self._batch_of(step), self._cfg.train.seed
        windows = [sequences_before(self._cfg, number) for number in (batch, batch + 1)]
        self._recent.add(number, values, batch=batch, windows=windows, seed=seed, mesh=self._mesh)
        bad = exit_codes.not_finite(values)
        if bad:
            self._left_out(number, bad, values)
            return
        if not math.isfinite(watched):
            return
        limit = self._window.limit()
        if self._cfg.guard.spike != "ignore" and watched > limit:
            text = f"{name}{where} {watched:.4f} is a spike, above {limit:.4f}"
            text = f"step {number}: {text}; batch {batch}"
            self._log(f"WARNING    {text}")
            if self._cfg.guard.spike == "rewind":
                raise exit_codes.Spike(step, text)
        self._window.add(watched)

    def _left_out(self, number: int, bad: list[str], values: dict[str, float]) -> None:
        in_a_row, most = int(values.get("in_a_row", 1)), self._cfg.guard.max_skips
        text = f"step {number}: {', '.join(bad)}: the update was skipped"
        if values.get("loss_scale", 1.0) > 1:
            text += f", and the loss scale of {values['loss_scale']:g} was halved"
        skipped = int(values.get("skipped", 1))
        self._log(f"WARNING    {text} ({in_a_row} in a row, {skipped} in total)")
        if in_a_row >= most:
            rule = f"{in_a_row} updates in a row were skipped, and guard.max_skips is {most}"
            raise exit_codes.BadNumerics(
                f"{text}; {rule}. Checkpoints of earlier steps are untouched."
            )


def _values_before(run_dir: Path, first_step: int, count: int, name: str) -> list[float]:
    """Return the recorded values of a metric before `first_step`; the same in every process.

    With them, a resumed run judges the next step as an uninterrupted run would.
    """
    records: list[dict[str, Any]] = [
        record for step, record in sorted(read_recent(run_dir).items()) if step <= first_step
    ]
    known = values_judged(records, name)
    values = np.full(count, np.nan, np.float32)
    values[: len(known[-count:])] = known[-count:]
    if jax.process_count() > 1:
        values = np.asarray(multihost_utils.broadcast_one_to_all(values))
    return [float(value) for value in values if not np.isnan(value)]


def rewind(
    cfg: Config,
    mesh: Mesh,
    loader: Loader,
    origin: Callable[[], initial_weights.Origin | None],
    spike: exit_codes.Spike,
    log: Callable[[str], None],
) -> tuple[TrainState, int | None]:
    """Return the state of the last checkpoint, or the initial one, and skip the bad batches.

    `loader` skips the batches that led to the spike from now on. So does any run that resumes from
    this one: the list is written to the run folder first, and to every later checkpoint.

    Args:     origin: finds the initial weights, used if there is no checkpoint yet.
    Returns:  the state, and the number of steps it has taken; None for the initial state.
    Raises:   BadNumerics after too many rewinds.
    """
    g, skipped = cfg.guard, loader.skipped
    steps = saved_steps(cfg.run.dir)
    if skipped.rewinds >= g.max_rewinds:
        rule = f"the run has rewound {g.max_rewinds} times, the limit of guard.max_rewinds"
        raise exit_codes.BadNumerics(
            f"{spike}; {rule}. Checkpoints of earlier steps are untouched."
        )
    last = skipped.batch_of(spike.step)
    first = max(last - g.spike_skip + 1, skipped.batch_of(steps[-1] if steps else 0))
    loader.skipped = skipped.after_rewind(first, last - first + 1)
    if jax.process_index() == 0:
        write_skipped(Path(cfg.run.dir), loader.skipped)
    step: int | None = None
    if steps:
        from jaxpar.checkpoint.loading import restore_latest

        state, step = restore_latest(cfg, mesh)
    else:
        state = initial_weights.state(cfg, mesh, origin(), log)
    log(f"rewound to step {step or 0}; batches {first} to {last} are skipped")
    return jax.block_until_ready(state), step
