"""The training loop, and the list of a run's callbacks, in the order in which they act."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxpar.checkpoint.saved import read_saved, saved_steps
from jaxpar.config import flag
from jaxpar.monitoring.goodput import (
    RESTORED,
    Recorder,
    described,
    goodput,
    host_losses,
    read_events,
    restarts,
)
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.batch import Batch
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import TrainState
from jaxpar.training.callbacks.callback import Progress, RunCallback
from jaxpar.training.callbacks.checks import (
    Evaluations,
    ExitOnFailure,
    Folder,
    Replicas,
    StopRequests,
)
from jaxpar.training.callbacks.own import gone, own_callbacks
from jaxpar.training.callbacks.saves import Checkpoints, MemoryCopies, SaveOnFailure
from jaxpar.training.callbacks.steps import Compilation, Phases, Profiles, StepClock, StepMetrics
from jaxpar.training.evaluation import EarlyStopping
from jaxpar.training.manifest import RunRecords
from jaxpar.training.programs import Prepared, StepPrograms, programs_of
from jaxpar.training.run import Run, Start
from jaxpar.training.step_guard import rewind

if TYPE_CHECKING:
    from jaxpar.training.object_store import RunInStore


def steps(
    at: Progress,
    step: Callable[[TrainState, Batch, int], tuple[TrainState, Metrics]],
    batches: Iterable[Batch],
    callbacks: Sequence[RunCallback],
) -> Progress:
    """Take the steps of a run, and call its callbacks between them. Returns the last progress.

    Raises:   Spike when the run must go back to a checkpoint.
    """
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            callback.prepare(at)
            stack.push(lambda _, error, __, one=callback: one.close(at, error))
        for batch in batches:
            for callback in callbacks:
                batch = callback.before_step(at, batch)
            state, metrics = step(at.state, batch, at.step)
            at = at.after(state, metrics)
            for callback in callbacks:
                at = callback.after_step(at)
            if at.ends:
                break
    return at


def train(run: Run, watch: Watchdog, records: RunRecords, store: "RunInStore | None" = None) -> int:
    """Train to the last step, from the start or from a checkpoint. Returns the exit code.

    Args:     records: of the run's folder. store: of a run that has one.
    """
    if run.first_step == run.cfg.train.num_steps:
        more = flag("train.num_steps", 2 * run.first_step)
        log(f"already done: {run.dir}; {more} trains on")
        return exit_codes.EXIT_OK
    if (stopping := EarlyStopping(run.cfg, run.first_step, run.in_memory)).stops:
        log(f"already done: {run.dir}, stopped early: {stopping.describe()}")
        return exit_codes.EXIT_OK
    several = jax.process_count() > 1
    with (
        signals.StopRequest(several) as stop,
        Recorder(run.dir) as spent,
        stage("starting") as now,
        contextlib.ExitStack() as until_the_end,
    ):
        phases = Phases(watch, spent, now)
        if store is not None and store.mirror is not None:
            store.mirror.record_to(spent.event)
            until_the_end.callback(store.mirror.record_to, None)
        start = run.start()
        ready = until_the_end.enter_context(programs_of(run, start, spent.event))
        watch.report = lambda: order_of_collectives(ready.train_step)
        spent.event("compiled", from_cache=run.startup.from_cache)
        if start.restored is not None:
            spent.event(RESTORED, **start.restored)
        spent.started(start.step or 0, run.startup.seconds)
        for line in gone(run.cfg, start.saved):
            log(line)
        while True:
            try:
                code = attempt(run, start, ready, stop, phases, records, store)
                break
            except exit_codes.Spike as spike:
                found = spike.with_traceback(None)  # its frames hold the state
            if stop.due():  # if the loss kept spiking, the run would never reach a save
                saved_in = store.own if store is not None else None
                code = stopped_without_saving(saved_in or run.dir, stop, found)
                break
            phases.enter("restore", start.step or 0, slow=True)
            if ready.memory is not None:
                ready.memory.forget()
            if store is not None:
                store.bring_newest()
            state, step = rewind(run.cfg, run.mesh, run.loader, run.initial.again, found, log)
            saved = None if step is None else read_saved(run.dir, step)
            run.go_on_from(saved)
            start = Start(state, step, saved)
            spent.goes_on_from(step or 0)
    events = read_events(run.dir)
    log(str(goodput(events)))
    for lost in (described(host_losses(events)), restarts(events)):
        if lost:
            log(str(lost))
    return code


def attempt(
    run: Run,
    start: Start,
    ready: Prepared,
    stop: signals.StopRequest,
    phases: Phases,
    records: RunRecords,
    store: "RunInStore | None",
) -> int:
    """Take the steps from a start to the run's last. Returns the exit code.

    Raises:   as `steps`.
    """
    first, programs = start.step or 0, ready.train_step
    clock = StepClock(phases, programs, first)
    callbacks = callbacks_of(run, start, ready, stop, phases, clock, records, store)
    at = Progress(
        config=run.cfg,
        mesh=run.mesh,
        folder=run.dir,
        step=first,
        last_step=run.cfg.train.num_steps,
        state=start.state,
    )
    with contextlib.closing(run.loader.prefetched(first)) as batches:
        at = steps(at, programs, clock.timed(batches), callbacks)
    if at.preempted:
        return exit_codes.EXIT_PREEMPTED
    log(f"done: {run.dir}{at.request.stop and f', stopped early: {at.request.stop}'}")
    return exit_codes.EXIT_OK


def stopped_without_saving(folder: Path, stop: signals.StopRequest, spike: exit_codes.Spike) -> int:
    """Log that the run stops before it has rewound. Returns the exit code of a stop."""
    saved = saved_steps(folder)
    there = f"resumes from the checkpoint of step {saved[-1]}" if saved else "starts over"
    log(f"{stop.received}: {spike}; stopped without saving; the same command {there}")
    return exit_codes.EXIT_PREEMPTED


def order_of_collectives(programs: StepPrograms) -> list[str]:
    """Return what a run that hangs reports of its latest step."""
    from jaxpar.monitoring.hlo import collective_order

    return collective_order(programs.program.as_text())


def callbacks_of(
    run: Run,
    start: Start,
    ready: Prepared,
    stop: signals.StopRequest,
    phases: Phases,
    clock: StepClock,
    records: RunRecords,
    store: "RunInStore | None",
) -> list[RunCallback]:
    """Return the callbacks of a run that goes on from `start`.

    They act before and after a step in this order, and are closed in reverse.
    """
    stopping = EarlyStopping(run.cfg, start.step, start.saved)
    mirror, where = (None, None) if store is None else (store.mirror, store.own)
    programs, record = ready.train_step, phases.spent.event
    metrics = StepMetrics(run, ready, clock, mirror.backlog if mirror else None, record)
    own = own_callbacks(run.cfg, start.saved, metrics.add)
    copies = None
    if ready.memory is not None:
        copies = MemoryCopies(run, ready.memory, stopping, metrics, phases, own)
    checkpoints = Checkpoints(run, ready, stop, stopping, metrics, phases, records, where, own)
    replicas = [] if ready.replicas is None else [Replicas(ready.replicas, metrics)]
    return [
        Folder(records),
        metrics,
        *own,
        Compilation(programs, metrics, phases),
        *replicas,
        Evaluations(ready.evaluation, stopping, metrics, phases, own),
        StopRequests(stop),
        *([copies] if copies else []),
        checkpoints,
        ExitOnFailure(),
        Profiles(programs, metrics, phases),
        SaveOnFailure(start, copies, checkpoints, metrics, phases),
        clock,
    ]
