"""The training loop."""

import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar import checkpoint
from jaxpar.monitoring.goodput import Recorder, goodput, read_events
from jaxpar.profiling.hlo.collective_order import collective_order
from jaxpar.profiling.in_run import RunProfiler
from jaxpar.runtime import exit_codes, signals
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.program import exit_on_failure
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.sharding.mesh import describe
from jaxpar.step.compiled import FirstRunAlone, check_host_memory, memory_of
from jaxpar.step.replica_check import make_replica_check, require_equal
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import make_train_step
from jaxpar.training.evaluation import Evaluation
from jaxpar.training.rewind import rewind
from jaxpar.training.run import Run


@dataclass(frozen=True)
class Phases:
    """What the loop is at, for those who measure it: how long at most, and how long in all."""

    watch: Watchdog
    spent: Recorder

    def enter(self, part: str, step: int, *, slow: bool = False) -> None:
        """A part of `goodput` begins, of a step. Args:     slow: as in `Watchdog.enter`."""
        self.spent.now(part)
        self.watch.enter(part, step, slow=slow)


def train(run: Run, watch: Watchdog) -> int:
    """Train, from the start or a checkpoint, to the end. Returns an exit code."""
    if run.first_step == run.cfg.train.num_steps:
        log(f"done already: {run.dir}")
        return exit_codes.EXIT_OK
    with signals.StopRequest(jax.process_count() > 1) as stop, Recorder(run.dir) as spent:
        phases = Phases(watch, spent)
        state = run.start()
        train_step = compiled(run, state)
        watch.report = lambda: collective_order(train_step.program.as_text())
        spent.started(run.first_step or 0, run.startup.seconds)
        while True:
            try:
                code = train_from(run, state, train_step, stop, phases)
                break
            except exit_codes.Spike as spike:
                found = spike.with_traceback(None)  # its frames hold the state
            if stop.due():  # it would not come to a save, where the loss spikes again and again
                code = stopped_without_saving(run, stop, found)
                break
            phases.enter("restore", run.first_step or 0, slow=True)
            state, run.first_step = rewind(run.cfg, run.mesh, run.loader, run.origin, found, log)
            spent.goes_on_from(run.first_step or 0)
    log(str(goodput(read_events(run.dir))))
    return code


def train_from(
    run: Run, state: TrainState, train_step: Any, stop: signals.StopRequest, phases: Phases
) -> int:
    """The loop. Returns an exit code.

    Raises:   Spike where the run is to go back.
    """
    cfg, spent = run.cfg, phases.spent
    tokens_per_step = cfg.train.global_batch_size * cfg.data.seq_len
    first, last = run.first_step or 0, cfg.train.num_steps
    evaluate = Evaluation(cfg, run.mesh, run.held_out, run.max_segments)
    replicas = make_replica_check(cfg, run.mesh)
    batches = run.loader.prefetched(first)
    with (
        checkpoint.Checkpointer(cfg, log, run.loader.skipped, spent.event, run.asked) as saver,
        run.metrics() as metrics,
        exit_on_failure(),
        RunProfiler(cfg, run.dir, train_step.program, describe(run.mesh), log) as profiler,
    ):
        saver.prepare(state)
        for step in range(first, last):
            profiler.before(step + 1, state, metrics.pause, phases.enter)
            phases.enter("data wait", step + 1)
            began = time.perf_counter()
            _, batch = next(batches)
            data_wait = time.perf_counter() - began
            phases.enter("step", step + 1, slow=step == first)
            state, measured = train_step(state, batch)
            dispatch = time.perf_counter() - began - data_wait
            if "first step" not in run.startup.seconds:  # it has been waited for
                run.startup.ended("first step")
                log(str(run.startup))
            metrics.write_previous(step, measured, data_wait, dispatch)
            done = step + 1
            if due(done, cfg.guard.replica_check_every, last):
                metrics.pause()
                require_equal(done, replicas(state))
            if due(done, cfg.evaluation.every, last):
                phases.enter("evaluation", done, slow=True)
                metrics.pause()
                metrics.evaluation(done, *evaluate(state.params))
                phases.enter("step", done)
            spent.done(done)
            stopping = stop.due()
            if stopping or due(done, cfg.checkpoint.every, last):
                phases.enter("save wait", done, slow=True)
                metrics.pause()
                saver.save(state, done, done * tokens_per_step)
                spent.record(done)
            if stopping:
                saver.finish()
                log(f"{stop.received}: saved step {done}; the same command goes on from there")
                return exit_codes.EXIT_PREEMPTED
        metrics.flush()
        phases.enter("save wait", last, slow=True)
        spent.record(last)
    batches.close()
    log(f"done: {run.dir}")
    return exit_codes.EXIT_OK


def stopped_without_saving(run: Run, stop: signals.StopRequest, spike: exit_codes.Spike) -> int:
    """Say that the run ends before it has gone back. Returns the exit code of a stop."""
    steps = checkpoint.saved_steps(run.dir)
    there = f"goes on from the checkpoint of step {steps[-1]}" if steps else "begins anew"
    log(f"{stop.received}: {spike}, and nothing is saved after it; the same command {there}")
    return exit_codes.EXIT_PREEMPTED


def due(done: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return every > 0 and (done % every == 0 or done == last)


def compiled(run: Run, state: TrainState):
    """The train step, compiled for this run's shapes before its first use, and timed."""
    began = time.perf_counter()
    step: Any = make_train_step(run.cfg, run.mesh, run.max_segments)
    lowered = step.lower(state, run.loader.batch(0))
    peers.check_same("program", lambda: lowered.as_text(), run.cfg.cluster.slow_seconds)
    program = lowered.compile()
    # The devices meet from here on: nobody is still compiling.
    check_host_memory(program, run.cfg, peers.any_process)
    log(f"compiled in {time.perf_counter() - began:.1f} s{memory_of(program, state)}")
    run.startup.ended("compilation")
    return FirstRunAlone(program)
