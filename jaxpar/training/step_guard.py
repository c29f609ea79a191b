"""Checks every step's metrics for non-finite values and loss spikes, and records them."""

import collections
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.config import Config
from jaxpar.config.lists.step_sizes import sequences_before
from jaxpar.monitoring.recent_steps import RecentSteps, losses_judged, read_recent
from jaxpar.runtime import exit_codes

#: Converts a median absolute deviation to the standard deviation of a normal distribution.
MAD_TO_DEVIATION = 1.4826

#: The least deviation, as a share of the median. If the losses are nearly equal, rounding would
#: otherwise count as a spike.
MIN_DEVIATION = 0.01


class Window:
    """The latest losses, which decide whether the next one is a spike."""

    def __init__(self, size: int, deviations: float, losses: Iterable[float] = ()):
        self._deviations = deviations
        self._losses = collections.deque(losses, maxlen=size)

    def limit(self) -> float:
        """Return the largest loss that is not a spike; infinite until the window is half full."""
        if len(self._losses) < (self._losses.maxlen or 0) / 2:
            return math.inf
        median = statistics.median(self._losses)
        mad = statistics.median(abs(loss - median) for loss in self._losses)
        deviation = max(MAD_TO_DEVIATION * mad, MIN_DEVIATION * abs(median))
        return median + self._deviations * deviation

    def add(self, loss: float) -> None:
        """Append a loss to the window."""
        self._losses.append(loss)


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
        before = _losses_before(run_dir, first_step, g.spike_window)
        self._recent = RecentSteps(run_dir, size if jax.process_index() == 0 else 0)
        self._window = Window(g.spike_window, g.spike_deviations, before)

    def look(self, step: int, values: dict[str, float]) -> None:
        """Record and check the metrics of a step.

        Args:     step: counted from 0. values: of `Metrics`.
        Raises:   BadNumerics when too many updates in a row were skipped; Spike when the run must
                  rewind.
        """
        number, loss = step + 1, values["loss"]
        batch, seed = self._batch_of(step), self._cfg.train.seed
        windows = [sequences_before(self._cfg, number) for number in (batch, batch + 1)]
        self._recent.add(number, values, batch=batch, windows=windows, seed=seed, mesh=self._mesh)
        bad = exit_codes.not_finite(values)
        if bad:
            self._left_out(number, bad, values)
            return
        limit = self._window.limit()
        if self._cfg.guard.spike != "ignore" and loss > limit:
            text = f"step {number}: loss {loss:.4f} is a spike, above {limit:.4f}; batch {batch}"
            self._log(f"WARNING    {text}")
            if self._cfg.guard.spike == "rewind":
                raise exit_codes.Spike(step, text)
        self._window.add(loss)

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


def _losses_before(run_dir: Path, first_step: int, count: int) -> list[float]:
    """Return the recorded losses of the steps before `first_step`; the same in every process.

    With them, a resumed run judges the next step as an uninterrupted run would.
    """
    records: list[dict[str, Any]] = [
        record for step, record in sorted(read_recent(run_dir).items()) if step <= first_step
    ]
    known = losses_judged(records)
    losses = np.full(count, np.nan, np.float32)
    losses[: len(known[-count:])] = known[-count:]
    if jax.process_count() > 1:
        losses = np.asarray(multihost_utils.broadcast_one_to_all(losses))
    return [float(loss) for loss in losses if not np.isnan(loss)]
