"""The training loop."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpar import checkpoint
from jaxpar.config.lists.step_sizes import in_words
from jaxpar.execution.decisions import execution_of
from jaxpar.monitoring.goodput import Recorder, goodput, read_events
from jaxpar.monitoring.hlo.collective_order import collective_order
from jaxpar.monitoring.host_losses import described, host_losses
from jaxpar.monitoring.restarts import RESTORED, restarts
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.compilation import CacheReads
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.batch import Batch
from jaxpar.step.compiled import FirstRunAlone, check_host_memory, memory_of
from jaxpar.step.diloco.schedule import under_way
from jaxpar.step.identity import identity
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import make_train_step
from jaxpar.training.between_steps import BetweenSteps, Phases
from jaxpar.training.emergency import saved_on_failure
from jaxpar.training.evaluating.early_stop import Judge
from jaxpar.training.prepared import Prepared, prepared
from jaxpar.training.rewind import rewind
from jaxpar.training.run import Run
from jaxpar.training.step_guard import require_recorded


def train(run: Run, watch: Watchdog) -> int:
    """Train to the last step, from the start or from a checkpoint. Returns the exit code."""
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
        state = run.start()
        ready = until_the_end.enter_context(prepared(run, state, compiled))
        watch.report = lambda: collective_order(ready.train_step.program.as_text())
        spent.event("compiled", from_cache=run.startup.from_cache)
        if run.restored is not None:
            spent.event(RESTORED, **run.restored)
        spent.started(run.first_step or 0, run.startup.seconds)
        run.calls.request_stop = stop.request
        run.calls.started(run.first_step or 0)
        while True:
            try:
                code = steps(run, state, ready, stop, phases)
                break
            except exit_codes.Spike as spike:
                found = spike.with_traceback(None)  # its frames hold the state
            if stop.due():  # if the loss kept spiking, the run would never reach a save
                code = stopped_without_saving(run, stop, found)
                break
            phases.enter("restore", run.first_step or 0, slow=True)
            if ready.memory is not None:
                ready.memory.forget()
            run.copies.clear()
            run.bring_newest()
            state, run.first_step = rewind(
                run.cfg, run.mesh, run.loader, run.initial.again, found, log
            )
            spent.goes_on_from(run.first_step or 0)
    events = read_events(run.dir)
    log(str(goodput(events)))
    for lost in (described(host_losses(events)), restarts(events)):
        if lost:
            log(str(lost))
    run.calls.ended(code)
    return code


def steps(
    run: Run, state: TrainState, ready: Prepared, stop: signals.StopRequest, phases: Phases
) -> int:
    """Run all steps, from the run's first to its last. Returns the exit code.

    Raises:   Spike when the run must go back to a checkpoint.
    """
    with (
        BetweenSteps(run, ready, stop, phases) as between,
        saved_on_failure(between, state) as last,
    ):
        between.saver.prepare(state)
        for step in range(between.first, between.last):
            batch = between.batch_for(step, state)
            state, metrics = ready.train_step(state, batch, under_way(step, run.cfg))
            state = ready.outer_steps(step + 1, state)
            last.finished(step + 1, state)
            between.report(step, metrics)
            between.check_replicas(step + 1, state)
            between.evaluate(step + 1, state)
            if between.save(step + 1, state):
                return exit_codes.EXIT_PREEMPTED
            if step + 1 == between.last:  # perhaps early
                break
        between.finish()
    between.batches.close()
    early = (
        f", stopped early: {between.judge.describe()}"
        if between.last < run.cfg.train.num_steps
        else ""
    )
    log(f"done: {run.dir}{early}")
    return exit_codes.EXIT_OK


def stopped_without_saving(run: Run, stop: signals.StopRequest, spike: exit_codes.Spike) -> int:
    """Log that the run stops before it has rewound. Returns the exit code of a stop."""
    saved = checkpoint.saved_steps(run.own or run.dir)
    there = f"resumes from the checkpoint of step {saved[-1]}" if saved else "starts over"
    log(f"{stop.received}: {spike}; stopped without saving; the same command {there}")
    return exit_codes.EXIT_PREEMPTED


def compiled(
    run: Run,
    state: TrainState,
    batch: Batch,
    meanwhile: Callable[[], None] = lambda: None,
    fragment: int | None = None,
) -> FirstRunAlone:
    """Compile the train step for one size of steps before its first use, and log the time.

    Args:     batch: an example, which may be abstract. meanwhile: called when XLA starts to
              compile; should return at once. fragment: as in `make_train_step`.
    """
    began = time.perf_counter()
    cfg, record = run.config_of(*batch.tokens.shape), bool(run.cfg.run.record_routing)
    which = "" if cfg == run.cfg else f" for {in_words(cfg)}"
    which += "" if fragment is None else f" with the exchange of fragment {fragment}"
    step: Any = make_train_step(
        cfg,
        run.mesh,
        run.max_segments,
        execution_of(cfg),
        requested=("expert_rows", *(["routing"] if record else [])),
        fragment=fragment,
    )
    with stage("compiling the train step") as now:
        lowered = step.lower(state, run.taught(batch))
        require_recorded(cfg, lowered.out_info[1])
        peers.check_same(f"program{which}", lambda: identity(lowered), run.cfg.cluster.slow_seconds)
        now.at("XLA")
        meanwhile()
        with CacheReads() as reads:
            program = lowered.compile()
    run.startup.from_cache = bool(reads.hits)
    # The first collective: from here on, no process is still compiling.
    check_host_memory(program, run.cfg, peers.any_process)
    how = "read from the compilation cache" if reads.hits else "compiled"
    log(f"{how}{which} in {time.perf_counter() - began:.1f} s{memory_of(program, state)}")
    run.startup.ended("compilation")
    return FirstRunAlone(program)
