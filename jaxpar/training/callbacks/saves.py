"""Saves: checkpoints, copies in the memory of hosts, and the last step before an exception."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxpar.checkpoint.saving import Checkpointer, SaveFailed
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.files.lock import RunLocked
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.program import end_with
from jaxpar.runtime.terminal import warn
from jaxpar.training import chosen as weights
from jaxpar.training.callbacks.callback import Progress, RunCallback
from jaxpar.training.callbacks.own import states_of
from jaxpar.training.callbacks.steps import Phases, StepMetrics
from jaxpar.training.evaluation import EarlyStopping
from jaxpar.training.manifest import RunRecords
from jaxpar.training.programs import Prepared
from jaxpar.training.run import Run, Start

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.writing import MemoryCheckpointer

#: Seconds for all processes to meet, each with an exception after the same step. One that fails
#: alone ends this much later.
AGREE_SECONDS = 3.0

#: Seconds of a save, if `cluster.hang_seconds` sets no limit.
SAVE_SECONDS = 600.0

#: Exceptions after which nothing is saved: the numbers are bad, the folder is another run's, the
#: disk or the memory is full, or devices or processes are gone.
UNSAVED = (
    *(exit_codes.BadNumerics, exit_codes.Spike, RunLocked, SaveFailed, MemoryError),
    *(jax.errors.JaxRuntimeError, peers.PeerFailed, peers.PeersMissing),
)


@dataclass(eq=False)
class MemoryCopies(RunCallback):
    """Copies the state to the memory of hosts."""

    run: Run
    memory: "MemoryCheckpointer"
    stopping: EarlyStopping
    metrics: StepMetrics
    phases: Phases
    others: Sequence[RunCallback]
    """Whose states each copy has."""

    def after_step(self, at: Progress) -> Progress:
        if self.memory.due(at.step) and not at.ends:
            self.phases.enter("save wait", at.step)
            self.metrics.pause()
            self._copy(at)
        return at

    def copy_now(self, at: Progress) -> None:
        """Copy the state, and wait until the copy is complete."""
        self.memory.wait()
        self._copy(at)
        self.memory.wait()

    def _copy(self, at: Progress) -> None:
        loader = self.run.loader
        self.memory.save(
            at.state,
            at.step,
            loader.sizes_of_steps.tokens_before(at.step),
            loader.skipped,
            self.stopping.best,
            states_of(self.others, at),
            loader.position(at.step),
        )


@dataclass(eq=False)
class Checkpoints(RunCallback):
    """Saves a checkpoint if one is due, is the best so far, or was asked for; and before the run
    stops because of a signal."""

    run: Run
    ready: Prepared
    stop: signals.StopRequest
    stopping: EarlyStopping
    metrics: StepMetrics
    phases: Phases
    records: RunRecords
    own: Path | None
    """As in `Checkpointer`."""
    others: Sequence[RunCallback]
    """Whose states each checkpoint has."""

    def prepare(self, at: Progress) -> None:
        run = self.run
        self.saver = Checkpointer(
            run.cfg,
            log,
            run.loader.skipped,
            self.phases.spent.event,
            run.asked,
            self.ready.host,
            self.own,
            weights.to_json(run.weights_from),
        )
        self.saver.keep_best(self.stopping.best)
        self.saver.prepare(at.state)

    def after_step(self, at: Progress) -> Progress:
        spent = self.phases.spent
        spent.done(at.step)
        due = at.every(at.config.checkpoint.every) or self.stopping.improved or at.request.save
        if due or at.preempted:
            self.phases.enter("save wait", at.step, slow=True)
            self.metrics.pause()
            self._save(at)
            spent.record(at.step)
        if at.preempted:
            self.saver.finish()
            log(f"{self.stop.received}: saved step {at.step}; the same command resumes from there")
        return at

    def save_now(self, at: Progress) -> None:
        """Save the state, and wait until the checkpoint is complete.

        Raises:   SaveFailed.
        """
        self._save(at)
        self.saver.finish()

    def _save(self, at: Progress) -> None:
        self.records.before_save()
        loader, states = self.run.loader, states_of(self.others, at)
        tokens = loader.sizes_of_steps.tokens_before(at.step)
        position = loader.position(at.step)
        self.saver.save(at.state, at.step, tokens, self.stopping.best, states, position)

    def close(self, at: Progress, error: BaseException | None) -> None:
        if error is None:
            self.phases.enter("save wait", at.step, slow=True)
            self.phases.spent.record(at.step)
        self.saver.__exit__(type(error) if error else None, error, None)


@dataclass(eq=False)
class SaveOnFailure(RunCallback):
    """Saves the last finished step if an exception ends the loop. It is closed first.

    The step is saved in memory if the run keeps copies there. If it started from such a copy and
    has got no further, another start would not either: then it is saved as a checkpoint, as in a
    run without copies. With several processes, it is saved if all fail after the same step.
    """

    start: Start
    memory: MemoryCopies | None
    checkpoints: Checkpoints
    metrics: StepMetrics
    phases: Phases

    def close(self, at: Progress, error: BaseException | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, UNSAVED):
            return
        try:
            self._save(at, error)
        except Exception as failure:  # the run ends by the first one
            warn(f"step {at.step} could not be saved: {type(failure).__name__}: {failure}")

    def _save(self, at: Progress, error: Exception) -> None:
        """Save the last finished step, in all processes or in none.

        Raises:   whatever a save raises.
        """
        stuck = at.step == (self.start.step or 0)
        memory = None if stuck else self.memory
        saved = at.step in self.checkpoints.saver.steps()
        if memory is None and (not at.config.checkpoint.every or saved):
            return
        if stuck and self.start.copy is None:
            return  # the initial state, or that of a checkpoint
        if not all_fail_at(at):
            return
        self.metrics.pause()  # the numbers of the step are checked first, as before any save
        what = f"{type(error).__name__}: step {at.step} is saved before the run ends"
        log(what)
        limit = at.config.cluster.hang_seconds or SAVE_SECONDS
        timer = threading.Timer(limit, end_with, [error])
        timer.daemon = True
        timer.start()
        try:
            self.phases.enter("save wait", at.step, slow=True)
            if memory is None:
                self.checkpoints.save_now(at)
            else:
                memory.copy_now(at)
        finally:
            timer.cancel()


def all_fail_at(at: Progress) -> bool:
    """Return whether all processes have failed after the same step, and have its state: a step that
    has failed has taken its memory."""
    there = not any(x.is_deleted() for x in jax.tree.leaves(at.state))
    try:
        said = peers.exchange("emergency", f"{at.step} {there}", AGREE_SECONDS)
    except (peers.PeersMissing, RuntimeError):
        return False
    return set(said) == {f"{at.step} True"}
