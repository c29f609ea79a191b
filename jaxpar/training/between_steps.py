"""The work between train steps: batches, metrics, checks, evaluation, checkpoints."""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from jaxpar import checkpoint
from jaxpar.monitoring.goodput import Recorder
from jaxpar.monitoring.profiles.in_run import RunProfiler
from jaxpar.runtime import signals
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.program import exit_on_failure
from jaxpar.runtime.stages import Stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import describe
from jaxpar.step.metrics import Metrics
from jaxpar.step.replica_check import require_equal
from jaxpar.step.state import TrainState
from jaxpar.training.evaluating.early_stop import Judge
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.prepared import Prepared
from jaxpar.training.run import Run

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


class BetweenSteps:
    """Everything around `state, metrics = train_step(state, batch)`. A context manager.

    `done` is the number of steps taken so far. Step times exclude evaluation, saving and other
    pauses (`MetricsWriter.pause`).
    """

    def __init__(self, run: Run, ready: Prepared, stop: signals.StopRequest, phases: Phases):
        self.run, self.ready, self.stop, self.phases = run, ready, stop, phases
        self.last = run.cfg.train.num_steps
        self.first = run.first_step or 0
        self.judge = Judge(run.cfg, run.first_step, run.in_memory)

    def __enter__(self) -> "BetweenSteps":
        run, cfg = self.run, self.run.cfg
        self.batches = run.loader.prefetched(self.first)
        programs = self.ready.train_step
        saver = checkpoint.Checkpointer(
            cfg,
            log,
            run.loader.skipped,
            self._event,
            run.asked,
            self.ready.host,
            run.own,
            weights.to_json(run.weights_from),
        )
        if run.mirror is not None:
            run.mirror.record_to(self._event)
        if self.ready.memory is not None:
            self.ready.memory.record = self._event
        profiler = RunProfiler(cfg, run.dir, programs, describe(run.mesh), log)
        with contextlib.ExitStack() as stack:
            self.saver = stack.enter_context(saver)
            self.saver.keep_best(self.judge.best)
            self.metrics = stack.enter_context(run.metrics())
            stack.enter_context(exit_on_failure())
            self.profiler = stack.enter_context(profiler)
            self.open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if self.run.mirror is not None:
            self.run.mirror.record_to(None)
        return self.open.__exit__(*error)

    def _event(self, name: str, **more: Any) -> None:
        """Record an event of a save, which a thread may report."""
        self.phases.spent.event(name, **more)
        self.run.calls.event(name, **more)

    def batch_for(self, step: int, state: TrainState) -> Batch:
        """Return the batch of step + 1. Profiles start and stop before it."""
        self.profiler.before(step + 1, state, self.metrics.pause, self.phases.enter)
        self.run.records.check_lock()
        self.run.calls.deliver()
        self.phases.enter("data wait", step + 1)
        began = time.perf_counter()
        _, batch = next(self.batches)
        self.data_wait = time.perf_counter() - began
        first = not self.ready.train_step.has(batch)
        if first:
            self._compile_for(step, state, batch)
        self.began = time.perf_counter()
        self.phases.enter("step", step + 1, slow=first or step == self.first)
        return self.run.taught(batch)

    def _compile_for(self, step: int, state: TrainState, batch: Batch) -> None:
        """Compile the train step for batches of another size than before."""
        self.metrics.pause()
        self.phases.enter("compile", step + 1, slow=True)
        self.ready.train_step.prepare(state, batch)

    def report(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of the previous step, whose values have arrived by now."""
        dispatch = time.perf_counter() - self.began
        startup = self.run.startup
        if "first step" not in startup.seconds:  # the first dispatch blocks until the step is done
            startup.ended("first step")
            log(str(startup))
            self.phases.spent.event("first step", step=step + 1)
        self.metrics.write_previous(step, metrics, self.data_wait, dispatch)

    def check_replicas(self, done: int, state: TrainState) -> None:
        """If due, check that replicas hold the same weights, bit for bit."""
        if self._due(done, self.run.cfg.guard.replica_check_every):
            self.metrics.pause()
            require_equal(done, self.ready.replicas(state))

    def evaluate(self, done: int, state: TrainState) -> None:
        """If due, compute held-out losses. Too many in a row that are no better end the run."""
        evaluation, self.judge.improved = self.ready.evaluation, False
        if names := evaluation.due(done):
            self.phases.enter("evaluation", done, slow=True)
            self.metrics.pause()
            self.metrics.evaluation(done, scores := evaluation(state, names))
            if line := self.judge.judge(done, scores):
                log(line)
            if self.judge.stops and done < self.last:
                self.last = done
                if evaluation.at_end:
                    self.metrics.evaluation(done, evaluation(state, evaluation.at_end))
            self.run.calls.evaluated(state)
            self.phases.enter("step", done)

    def save(self, done: int, state: TrainState) -> bool:
        """Save a checkpoint if one is due or is the best so far, or if the run was asked to stop.

        Returns:  whether the run stops here; the checkpoint is then complete.
        """
        cfg, spent = self.run.cfg, self.phases.spent
        spent.done(done)
        stopping = self.stop.due()
        memory = self.ready.memory
        if memory is not None and memory.due(done) and not stopping and done < self.last:
            self.phases.enter("save wait", done)
            self.metrics.pause()
            self._copy(done, state)
        if stopping or self.judge.improved or self._due(done, cfg.checkpoint.every):
            self.phases.enter("save wait", done, slow=True)
            self.metrics.pause()
            self._checkpoint(done, state)
            spent.record(done)
        if stopping:
            self.saver.finish()
            log(f"{self.stop.received}: saved step {done}; the same command resumes from there")
        return stopping

    def _checkpoint(self, done: int, state: TrainState) -> None:
        self.run.records.before_save()
        self.saver.save(state, done, self._tokens(done), self.judge.best)

    def _copy(self, done: int, state: TrainState) -> None:
        """Copy the state to the memory of hosts."""
        assert self.ready.memory is not None
        skipped = self.run.loader.skipped
        self.ready.memory.save(state, done, self._tokens(done), skipped, self.judge.best)

    def _tokens(self, done: int) -> int:
        return self.run.loader.sizes_of_steps.tokens_before(done)

    def save_now(self, done: int, state: TrainState, *, in_memory: bool) -> None:
        """Save the state, and wait until it is complete.

        Args:     in_memory: in the memory of hosts, not as a checkpoint.
        Raises:   SaveFailed.
        """
        self.phases.enter("save wait", done, slow=True)
        if in_memory and self.ready.memory is not None:
            self.ready.memory.wait()
            self._copy(done, state)
            self.ready.memory.wait()
            return
        self._checkpoint(done, state)
        self.saver.finish()

    def finish(self) -> None:
        """Write the metrics of the last step, then enter the wait for its checkpoint."""
        self.metrics.flush()
        self.phases.enter("save wait", self.last, slow=True)
        self.phases.spent.record(self.last)

    def _due(self, done: int, every: int) -> bool:
        """Whether something that happens every `every` steps, and at the end, happens now."""
        return every > 0 and (done % every == 0 or done == self.last)
