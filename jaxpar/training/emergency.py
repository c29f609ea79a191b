"""Saves the last finished step before an exception ends the run."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from jaxpar import checkpoint
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.run_lock import RunLocked
from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes import peers
from jaxpar.runtime.program import end_with
from jaxpar.training.between_steps import BetweenSteps

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


class LastFinished:
    """The state after the last finished step, and the number of that step."""

    def __init__(self, step: int):
        """Args:     step: from which the loop starts; it is saved, or the initial state."""
        self.first = self.step = step
        self._state: Any = None

    def finished(self, step: int, state: Any) -> None:
        """Note a step that has been dispatched, and its state."""
        self.step, self._state = step, state

    @property
    def state(self) -> Any:
        """The state; None if there is none, or a step that has failed has taken its memory."""
        leaves = jax.tree.leaves(self._state)
        return None if not leaves or any(x.is_deleted() for x in leaves) else self._state

    def forget(self) -> None:
        """Hold the state no longer."""
        self._state = None


@contextlib.contextmanager
def saved_on_failure(between: BetweenSteps, state: Any) -> Iterator[LastFinished]:
    """Save the last finished step if an exception ends the block, then raise the exception.

    The step is saved in memory if the run keeps copies there. If it started from such a copy and
    has got no further, another start would not either: then it is saved as a checkpoint, as in a
    run without copies. With several processes, it is saved if all fail after the same step.

    Args:     state: before the first step.
    """
    last = LastFinished(between.first)
    last.finished(between.first, state)
    try:
        yield last
    except UNSAVED:
        raise
    except Exception as error:
        try:
            _save(between, last, error)
        except Exception as failure:  # the run ends by the first one
            warn(f"step {last.step} could not be saved: {type(failure).__name__}: {failure}")
        raise
    finally:
        last.forget()


def _save(between: BetweenSteps, last: LastFinished, error: Exception) -> None:
    """Save the last finished step, in all processes or in none.

    Raises:   whatever a save raises.
    """
    run, stuck = between.run, last.step == last.first
    in_memory = between.ready.memory is not None and not stuck
    if not in_memory and (not run.cfg.checkpoint.every or last.step in between.saver.steps()):
        return
    if stuck and run.in_memory is None:
        return  # the initial state, or that of a checkpoint
    if not _all_fail_here(last):
        return
    between.metrics.pause()  # the numbers of the step are checked first, as before any save
    what = f"{type(error).__name__}: step {last.step} is saved before the run ends"
    peers.log(what)
    limit = run.cfg.cluster.hang_seconds or SAVE_SECONDS
    timer = threading.Timer(limit, end_with, [error])
    timer.daemon = True
    timer.start()
    try:
        between.save_now(last.step, last.state, in_memory=in_memory)
    finally:
        timer.cancel()


def _all_fail_here(last: LastFinished) -> bool:
    """Return whether all processes have failed after the same step, and have its state."""
    mine = f"{last.step} {last.state is not None}"
    try:
        said = peers.exchange("emergency", mine, AGREE_SECONDS)
    except (peers.PeersMissing, RuntimeError):
        return False
    return set(said) == {f"{last.step} True"}
