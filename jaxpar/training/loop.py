"""The training loop."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxpar import checkpoint
from jaxpar.monitoring.goodput import (
    RESTORED,
    Recorder,
    described,
    goodput,
    host_losses,
    read_events,
    restarts,
)
from jaxpar.monitoring.hlo import collective_order
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.batch import Batch
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import TrainState
from jaxpar.training.callbacks import own
from jaxpar.training.callbacks.base import RunCallback, prepared
from jaxpar.training.callbacks.callback import Progress
from jaxpar.training.callbacks.of_run import callbacks_of
from jaxpar.training.callbacks.steps import StepClock
from jaxpar.training.evaluating.early_stop import Judge
from jaxpar.training.phases import Phases
from jaxpar.training.prepared import Prepared, programs_of
from jaxpar.training.records import RunRecords
from jaxpar.training.rewind import rewind
from jaxpar.training.run import Run, Start
from jaxpar.training.stored import RunInStore


def steps(
    at: Progress,
    step: Callable[[TrainState, Batch, int], tuple[TrainState, Metrics]],
    batches: Iterable[Batch],
    callbacks: Sequence[RunCallback],
) -> Progress:
    """Take the steps of a run, and call its callbacks between them. Returns the last progress.

    Raises:   Spike when the run must go back to a checkpoint.
    """
    with prepared(callbacks, at) as latest:
        for batch in batches:
            for callback in callbacks:
                batch = callback.before_step(at, batch)
            state, metrics = step(at.state, batch, at.step)
            at = latest.at = at.after(state, metrics)
            for callback in callbacks:
                at = latest.at = callback.after_step(at)
            if at.ends:
                break
    return at


def train(run: Run, watch: Watchdog, records: RunRecords, store: RunInStore) -> int:
    """Train to the last step, from the start or from a checkpoint. Returns the exit code.

    Args:     records, store: of the run's folder.
    """
    if run.first_step == run.cfg.train.num_steps:
        log(f"already done: {run.dir}")
        return exit_codes.EXIT_OK
    if (judge := Judge(run.cfg, run.first_step, run.in_memory)).stops:
        log(f"already done: {run.dir}, stopped early: {judge.describe()}")
        return exit_codes.EXIT_OK
    several = jax.process_count() > 1
    with (
        signals.StopRequest(several) as stop,
        Recorder(run.dir) as spent,
        stage("starting") as now,
        contextlib.ExitStack() as until_the_end,
    ):
        phases = Phases(watch, spent, now)
        start = run.start()
        ready = until_the_end.enter_context(programs_of(run, start, spent.event))
        watch.report = lambda: collective_order(ready.train_step.program.as_text())
        spent.event("compiled", from_cache=run.startup.from_cache)
        if start.restored is not None:
            spent.event(RESTORED, **start.restored)
        spent.started(start.step or 0, run.startup.seconds)
        for line in own.gone(run.cfg, start.saved):
            log(line)
        while True:
            try:
                code = attempt(run, start, ready, stop, phases, records, store)
                break
            except exit_codes.Spike as spike:
                found = spike.with_traceback(None)  # its frames hold the state
            if stop.due():  # if the loss kept spiking, the run would never reach a save
                code = stopped_without_saving(run, store, stop, found)
                break
            phases.enter("restore", start.step or 0, slow=True)
            if ready.memory is not None:
                ready.memory.forget()
            store.bring_newest()
            state, step = rewind(run.cfg, run.mesh, run.loader, run.initial.again, found, log)
            saved = None if step is None else checkpoint.read_saved(run.dir, step)
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
    store: RunInStore,
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


def stopped_without_saving(
    run: Run, store: RunInStore, stop: signals.StopRequest, spike: exit_codes.Spike
) -> int:
    """Log that the run stops before it has rewound. Returns the exit code of a stop."""
    saved = checkpoint.saved_steps(store.own or run.dir)
    there = f"resumes from the checkpoint of step {saved[-1]}" if saved else "starts over"
    log(f"{stop.received}: {spike}; stopped without saving; the same command {there}")
    return exit_codes.EXIT_PREEMPTED
