"""The list of a run's callbacks, in the order in which they act."""

from jaxpar.runtime import signals
from jaxpar.training.callbacks.base import RunCallback
from jaxpar.training.callbacks.checks import (
    Evaluations,
    ExitOnFailure,
    Folder,
    Replicas,
    StopRequests,
)
from jaxpar.training.callbacks.own import own_callbacks
from jaxpar.training.callbacks.saves import Checkpoints, MemoryCopies, SaveOnFailure, Store
from jaxpar.training.callbacks.steps import Compilation, Profiles, StepClock, StepMetrics
from jaxpar.training.evaluating.early_stop import Judge
from jaxpar.training.phases import Phases
from jaxpar.training.prepared import Prepared
from jaxpar.training.records import RunRecords
from jaxpar.training.run import Run, Start
from jaxpar.training.stored import RunInStore


def callbacks_of(
    run: Run,
    start: Start,
    ready: Prepared,
    stop: signals.StopRequest,
    phases: Phases,
    clock: StepClock,
    records: RunRecords,
    store: RunInStore,
) -> list[RunCallback]:
    """Return the callbacks of a run that goes on from `start`.

    They act before and after a step in this order, and are closed in reverse.
    """
    judge = Judge(run.cfg, start.step, start.saved)
    mirror, programs, record = store.mirror, ready.train_step, phases.spent.event
    backlog = mirror.backlog if mirror is not None else None
    metrics = StepMetrics(run, ready, clock, backlog, record)
    own = own_callbacks(run.cfg, start.saved, metrics.add)
    copies = None
    if ready.memory is not None:
        copies = MemoryCopies(run, ready.memory, judge, metrics, phases, own)
    checkpoints = Checkpoints(run, ready, stop, judge, metrics, phases, records, store.own, own)
    replicas = [Replicas(ready.replicas, metrics)] if run.cfg.guard.replica_check_every else []
    return [
        Folder(records),
        metrics,
        *own,
        *([Store(mirror, record)] if mirror else []),
        Compilation(programs, metrics, phases),
        *replicas,
        Evaluations(ready.evaluation, judge, metrics, phases, own),
        StopRequests(stop),
        *([copies] if copies else []),
        checkpoints,
        ExitOnFailure(),
        Profiles(programs, metrics, phases),
        SaveOnFailure(start, copies, checkpoints, metrics, phases),
        clock,
    ]
