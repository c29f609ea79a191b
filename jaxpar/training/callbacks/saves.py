"""Saves: checkpoints, copies in the memory of hosts, and the last step before an exception."""

import threading
from collections.abc import Callable, Sequence

import jax

from jaxpar import checkpoint
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.files.run_lock import RunLocked
from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.program import end_with
from jaxpar.stores.mirror import Mirror
from jaxpar.training.callbacks.base import RunCallback
from jaxpar.training.callbacks.callback import Progress
from jaxpar.training.callbacks.own import states_of
from jaxpar.training.callbacks.steps import StepMetrics
from jaxpar.training.evaluating.early_stop import Judge
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.phases import Phases
from jaxpar.training.prepared import Prepared
from jaxpar.training.records import RunRecords
from jaxpar.training.run import Run
from jaxpar.training.stored import RunInStore

#: Seconds for all processes to meet, each with an exception after the same step. One that fails
#: alone ends this much later.
AGREE_SECONDS = 3.0

#: Seconds of a save, if `cluster.hang_seconds` sets no limit.
SAVE_SECONDS = 600.0

#: Exceptions after which nothing is saved: the numbers are bad, the folder is another run's, the
#: disk or the memory is full, or devices or processes are gone.
UNSAVED = (
    *(exit_codes.BadNumerics, exit_codes.Spike, RunLocked, checkpoint.SaveFailed, MemoryError),
    *(jax.errors.JaxRuntimeError, peers.PeerFailed, peers.PeersMissing),
)


class Store(RunCallback):
    """Records the uploads of a run in an object store."""

    def __init__(self, mirror: Mirror, record: Callable[..., None]):
        self._mirror, self._record = mirror, record

    def prepare(self, at: Progress) -> None:
        self._mirror.record_to(self._record)

    def close(self, at: Progress, error: BaseException | None) -> None:
        self._mirror.record_to(None)


class MemoryCopies(RunCallback):
    """Copies the state to the memory of hosts."""

    def __init__(
        self,
        run: Run,
        memory: MemoryCheckpointer,
        judge: Judge,
        metrics: StepMetrics,
        phases: Phases,
        others: Sequence[RunCallback],
    ):
        """Args:     others: whose states each copy has."""
        self._run, self._memory, self._judge = run, memory, judge
        self._metrics, self._phases, self._others = metrics, phases, others

    def after_step(self, at: Progress) -> Progress:
        if self._memory.due(at.step) and not at.ends:
            self._phases.enter("save wait", at.step)
            self._metrics.pause()
            self._copy(at)
        return at

    def copy_now(self, at: Progress) -> None:
        """Copy the state, and wait until the copy is complete."""
        self._memory.wait()
        self._copy(at)
        self._memory.wait()

    def _copy(self, at: Progress) -> None:
        loader = self._run.loader
        self._memory.save(
            at.state,
            at.step,
            loader.sizes_of_steps.tokens_before(at.step),
            loader.skipped,
            self._judge.best,
            states_of(self._others, at),
        )


class Checkpoints(RunCallback):
    """Saves a checkpoint if one is due, is the best so far, or was asked for; and before the run
    stops because of a signal."""

    def __init__(
        self,
        run: Run,
        ready: Prepared,
        stop: signals.StopRequest,
        judge: Judge,
        metrics: StepMetrics,
        phases: Phases,
        records: RunRecords,
        store: RunInStore,
        others: Sequence[RunCallback],
    ):
        """Args:     others: whose states each checkpoint has."""
        self._run, self._ready, self._stop, self._judge = run, ready, stop, judge
        self._metrics, self._phases, self._records = metrics, phases, records
        self._own, self._others = store.own, others

    def prepare(self, at: Progress) -> None:
        run = self._run
        self.saver = checkpoint.Checkpointer(
            run.cfg,
            log,
            run.loader.skipped,
            self._phases.spent.event,
            run.asked,
            self._ready.host,
            self._own,
            weights.to_json(run.weights_from),
        )
        self.saver.keep_best(self._judge.best)
        self.saver.prepare(at.state)

    def after_step(self, at: Progress) -> Progress:
        spent = self._phases.spent
        spent.done(at.step)
        due = at.every(at.config.checkpoint.every) or self._judge.improved or at.request.save
        if due or at.preempted:
            self._phases.enter("save wait", at.step, slow=True)
            self._metrics.pause()
            self._save(at)
            spent.record(at.step)
        if at.preempted:
            self.saver.finish()
            log(f"{self._stop.received}: saved step {at.step}; the same command resumes from there")
        return at

    def save_now(self, at: Progress) -> None:
        """Save the state, and wait until the checkpoint is complete.

        Raises:   SaveFailed.
        """
        self._save(at)
        self.saver.finish()

    def _save(self, at: Progress) -> None:
        self._records.before_save()
        tokens = self._run.loader.sizes_of_steps.tokens_before(at.step)
        states = states_of(self._others, at)
        self.saver.save(at.state, at.step, tokens, self._judge.best, states)

    def close(self, at: Progress, error: BaseException | None) -> None:
        if error is None:
            self._phases.enter("save wait", at.step, slow=True)
            self._phases.spent.record(at.step)
        self.saver.__exit__(type(error) if error else None, error, None)


class SaveOnFailure(RunCallback):
    """Saves the last finished step if an exception ends the loop. It is closed first.

    The step is saved in memory if the run keeps copies there. If it started from such a copy and
    has got no further, another start would not either: then it is saved as a checkpoint, as in a
    run without copies. With several processes, it is saved if all fail after the same step.
    """

    def __init__(
        self,
        run: Run,
        first: int,
        from_memory: bool,
        memory: MemoryCopies | None,
        checkpoints: Checkpoints,
        metrics: StepMetrics,
        phases: Phases,
    ):
        """Args:     first: from which the loop starts; it is saved, or the initial state.
        from_memory: it is a copy in memory.
        """
        self._run, self._first, self._memory = run, first, memory
        self._from_memory = from_memory
        self._checkpoints, self._metrics, self._phases = checkpoints, metrics, phases

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
        stuck = at.step == self._first
        memory = None if stuck else self._memory
        saved = at.step in self._checkpoints.saver.steps()
        if memory is None and (not self._run.cfg.checkpoint.every or saved):
            return
        if stuck and not self._from_memory:
            return  # the initial state, or that of a checkpoint
        if not all_fail_at(at):
            return
        self._metrics.pause()  # the numbers of the step are checked first, as before any save
        what = f"{type(error).__name__}: step {at.step} is saved before the run ends"
        log(what)
        limit = self._run.cfg.cluster.hang_seconds or SAVE_SECONDS
        timer = threading.Timer(limit, end_with, [error])
        timer.daemon = True
        timer.start()
        try:
            self._phases.enter("save wait", at.step, slow=True)
            if memory is None:
                self._checkpoints.save_now(at)
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
