"""Whether the run goes on: held-out losses, equal replicas, its folder, signals."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.monitoring.evaluations import Score, record_of
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.program import end_with
from jaxpar.sharding.batch import Batch
from jaxpar.training.callbacks.callback import Progress, Request, RunCallback
from jaxpar.training.callbacks.steps import Phases, StepMetrics
from jaxpar.training.evaluation import EarlyStopping, Evaluation
from jaxpar.training.manifest import RunRecords

if TYPE_CHECKING:
    from jaxpar.step.replica_check import ReplicaCheck


@dataclass(eq=False)
class Folder(RunCallback):
    """Checks that the run may still write its folder."""

    records: RunRecords

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        self.records.check_lock()
        return batch


@dataclass(eq=False)
class Replicas(RunCallback):
    """Checks that replicas hold the same weights, bit for bit."""

    check: "ReplicaCheck"
    metrics: StepMetrics

    def after_step(self, at: Progress) -> Progress:
        if at.every(at.config.guard.replica_check_every):
            from jaxpar.step.replica_check import require_equal

            self.metrics.pause()
            require_equal(at.step, self.check(at.state))
        return at


@dataclass(eq=False)
class Evaluations(RunCallback):
    """Computes held-out losses. Too many in a row that are no better end the run."""

    evaluation: Evaluation
    stopping: EarlyStopping
    metrics: StepMetrics
    phases: Phases
    others: Sequence[RunCallback]
    """The callbacks that hear of each evaluation."""

    def after_step(self, at: Progress) -> Progress:
        stopping, evaluation, ended = self.stopping, self.evaluation, at.ends
        stopping.improved = False
        if not (names := evaluation.due(at.step, ended)):
            return at
        self.phases.enter("evaluation", at.step, slow=True)
        self.metrics.pause()
        at, scores = self._evaluated(at, names)
        if line := stopping.update(at.step, scores):
            log(line)
        if stopping.stops and not at.ends:
            at = at.asked(Request(stop=stopping.describe()))
        if at.ends and not ended and evaluation.at_end:
            at, _ = self._evaluated(at, evaluation.at_end)
        self.phases.enter("step", at.step)
        return at

    def _evaluated(
        self, at: Progress, names: Sequence[str]
    ) -> tuple[Progress, Mapping[str, Score]]:
        scores = self.evaluation(at.state, names)
        more: dict[str, Any] = {}
        for callback in self.others:
            at, added = callback.evaluate(at, record_of(scores))
            more |= added
        self.metrics.evaluation(at, scores, more)
        return at, scores


@dataclass(eq=False)
class StopRequests(RunCallback):
    """Ends the run after a signal that asks for it: all processes after the same step."""

    stop: signals.StopRequest

    def after_step(self, at: Progress) -> Progress:
        return dataclasses.replace(at, preempted=True) if self.stop.due() else at


class ExitOnFailure(RunCallback):
    """Ends a process of several on an exception, before what comes earlier in the list is closed.

    That could hang: for example, a save in progress may wait for a process that is dead. Bad
    numerics and loss spikes occur in all processes alike, so they propagate as in a single process.
    """

    def close(self, at: Progress, error: BaseException | None) -> None:
        alike = isinstance(error, exit_codes.BadNumerics | exit_codes.Spike)
        if error is not None and peers.world_size() > 1 and not alike:
            end_with(error)
