"""What belongs to each step: its phases, its batch, its program, its metrics."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.monitoring.goodput import Recorder
from jaxpar.monitoring.gpus import open_gpus
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.profiler import RunProfiler
from jaxpar.monitoring.sinks import open_sinks
from jaxpar.parallel.context import order_of
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import Stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import describe
from jaxpar.training.callbacks.callback import Progress, RunCallback
from jaxpar.training.programs import Prepared, StepPrograms
from jaxpar.training.run import Run
from jaxpar.training.step_guard import StepGuard

#: What the loop does in a phase, with the number of the step.
IN_WORDS = {
    "step": "step {}",
    "data wait": "waiting for the batch of step {}",
    "compile": "compiling for the size of step {}",
    "evaluation": "evaluating after step {}",
    "save wait": "waiting for the save of step {}",
    "restore": "going back from step {}",
    "profile": "writing a profile before step {}",
}


@dataclass(frozen=True)
class Phases:
    """The current phase of the loop, for the watchdog (its limit), goodput (its duration) and the
    lines that say what takes long."""

    watch: Watchdog
    spent: Recorder
    stage: Stage

    def enter(self, part: str, step: int, *, slow: bool = False) -> None:
        """Enter a phase of a step.

        Args:     part: of `goodput.PARTS`. slow: as in `Watchdog.enter`.
        """
        self.spent.now(part)
        self.watch.enter(part, step, slow=slow)
        words = IN_WORDS.get(part, part + " at step {}")
        self.stage.enter(words.format(step), ordinary=part in ("step", "data wait"))


@dataclass(eq=False)
class StepClock(RunCallback):
    """Measures how long a step waits for its batch, and how long its dispatch takes. The last of
    the list: the step follows."""

    phases: Phases
    programs: StepPrograms
    first: int
    """Steps done before the loop."""
    data_wait: float = 0.0
    """Seconds of the latest step."""
    _began: float = 0.0

    def timed(self, batches: Iterator[tuple[int, Batch]]) -> Iterator[Batch]:
        """Yield the batches, and measure the wait for each."""
        for done in itertools.count(self.first):
            self.phases.enter("data wait", done + 1)
            began = time.perf_counter()
            _, batch = next(batches)
            self.data_wait = time.perf_counter() - began
            yield batch

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        slow = at.step == self.first or not self.programs.has_run(batch)
        self._began = time.perf_counter()
        self.phases.enter("step", at.step + 1, slow=slow)
        return batch

    def dispatched(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began


@dataclass(eq=False)
class Compilation(RunCallback):
    """Compiles the train step for batches of another size than before."""

    programs: StepPrograms
    metrics: "StepMetrics"
    phases: Phases

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        if not self.programs.has(batch):
            self.metrics.pause()
            self.phases.enter("compile", at.step + 1, slow=True)
            self.programs.prepare(at.state, batch)
        return batch


@dataclass(eq=False)
class StepMetrics(RunCallback):
    """Writes the metrics of each step, once the next one is dispatched, and checks them.

    Step times exclude evaluations, saves and other pauses.
    """

    run: Run
    ready: Prepared
    clock: StepClock
    more: Callable[[], dict[str, float]] | None
    """As `MetricsWriter.more`."""
    record: Callable[..., None]
    """Called with events."""

    def prepare(self, at: Progress) -> None:
        run, first = self.run, at.step
        cfg, loader, order = run.cfg, run.loader, functools.partial(order_of, run.cfg)
        guard = StepGuard(cfg, run.dir, first, loader.skipped.batch_of, log, describe(run.mesh))
        self._writer = writer = MetricsWriter(
            cfg,
            run.dir,
            first,
            self.ready.schedule,
            loader.epochs,
            guard.look,
            self.ready.forecast,
            open_sinks(cfg, run.dir, first, log),
            order,
            loader.sizes_of_steps,
        )
        writer.more = self.more or writer.more
        writer.gpus = open_gpus(cfg, log) if peers.rank() == 0 else None

    def after_step(self, at: Progress) -> Progress:
        dispatch, startup = self.clock.dispatched(), self.run.startup
        if "first step" not in startup.seconds:  # the first dispatch blocks until the step is done
            startup.ended("first step")
            log(str(startup))
            self.record("first step", step=at.step)
        self._writer.write_previous(at.step - 1, at.metrics, self.clock.data_wait, dispatch)
        return at

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add values to the record of the latest step."""
        self._writer.added = metrics

    def pause(self) -> None:
        """Fetch what is pending, and exclude the time until the next step from the step times.

        Raises:   BadNumerics; Spike.
        """
        self._writer.pause()

    def evaluation(self, at: Progress, scores: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Write and print an evaluation. Args:     more: metrics for its record."""
        self._writer.evaluation(at.step, scores, more)

    def close(self, at: Progress, error: BaseException | None) -> None:
        try:
            if error is None:
                self._writer.flush()
        finally:
            self._writer.__exit__()


@dataclass(eq=False)
class Profiles(RunCallback):
    """Traces steps that are due or were asked for."""

    programs: StepPrograms
    metrics: StepMetrics
    phases: Phases

    def prepare(self, at: Progress) -> None:
        mesh = describe(at.mesh)
        self._profiler = RunProfiler(at.config, at.folder, self.programs, mesh, log)

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        step = at.step + 1
        self._profiler.before(step, at.state, self.metrics.pause, self.phases.enter)
        return batch

    def close(self, at: Progress, error: BaseException | None) -> None:
        self._profiler.__exit__()
