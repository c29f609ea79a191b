"""Train a model: python -m jaxpar.train CONFIG [--section.field value ...]

The run folder is all there is to a run. If it holds a checkpoint, the run goes on from there.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar import checkpoint, cli, elastic, guard, processes, runtime
from jaxpar.config import Config
from jaxpar.config_json import to_json
from jaxpar.data.skips import SKIPPED_FILE
from jaxpar.evaluation import Evaluation
from jaxpar.goodput import Recorder, goodput, read_events
from jaxpar.parallel.mesh import describe
from jaxpar.processes import say
from jaxpar.profiling.in_run import RunProfiler, listening
from jaxpar.replicas import make_replica_check, require_equal
from jaxpar.rewinding import rewind
from jaxpar.run import Run
from jaxpar.run_lock import WAIT_SECONDS, RunLock, Taken
from jaxpar.state import TrainState
from jaxpar.step import make_train_step, memory_of
from jaxpar.watchdog import Watchdog


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
        say(f"done already: {run.dir}")
        return guard.EXIT_OK
    with guard.StopRequest(jax.process_count() > 1) as stop, Recorder(run.dir) as spent:
        phases = Phases(watch, spent)
        state = run.start()
        train_step = compiled(run, state)
        watch.program = train_step.program.as_text
        spent.started(run.first_step or 0, run.startup.seconds)
        while True:
            try:
                code = train_from(run, state, train_step, stop, phases)
                break
            except guard.Spike as spike:
                found = spike.with_traceback(None)  # its frames hold the state
            if stop.due():  # it would not come to a save, where the loss spikes again and again
                code = stopped_without_saving(run, stop, found)
                break
            phases.enter("restore", run.first_step or 0, slow=True)
            state, run.first_step = rewind(run.cfg, run.mesh, run.loader, run.origin, found, say)
            spent.goes_on_from(run.first_step or 0)
    say(str(goodput(read_events(run.dir))))
    return code


def train_from(
    run: Run, state: TrainState, train_step: Any, stop: guard.StopRequest, phases: Phases
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
        checkpoint.Checkpointer(cfg, say, run.loader.skipped, spent.event, run.asked) as saver,
        run.metrics() as metrics,
        cli.ending_at_once(),
        RunProfiler(cfg, run.dir, train_step.program, describe(run.mesh), say) as profiler,
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
                say(str(run.startup))
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
                say(f"{stop.received}: saved step {done}; the same command goes on from there")
                return guard.EXIT_PREEMPTED
        metrics.flush()
        phases.enter("save wait", last, slow=True)
        spent.record(last)
    batches.close()
    say(f"done: {run.dir}")
    return guard.EXIT_OK


def stopped_without_saving(run: Run, stop: guard.StopRequest, spike: guard.Spike) -> int:
    """Say that the run ends before it has gone back. Returns the exit code of a stop."""
    steps = checkpoint.saved_steps(run.dir)
    there = f"goes on from the checkpoint of step {steps[-1]}" if steps else "begins anew"
    say(f"{stop.received}: {spike}, and nothing is saved after it; the same command {there}")
    return guard.EXIT_PREEMPTED


def due(done: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return every > 0 and (done % every == 0 or done == last)


def compiled(run: Run, state: TrainState):
    """The train step, compiled for this run's shapes before its first use, and timed."""
    began = time.perf_counter()
    step: Any = make_train_step(run.cfg, run.mesh, run.max_segments)
    lowered = step.lower(state, run.loader.batch(0))
    processes.check_same("program", lambda: lowered.as_text(), run.cfg.cluster.slow_seconds)
    program = lowered.compile()
    # The devices meet from here on: nobody is still compiling.
    runtime.check_host_memory(program, run.cfg, processes.in_any)
    say(f"compiled in {time.perf_counter() - began:.1f} s{memory_of(program, state)}")
    run.startup.ended("compilation")
    return runtime.FirstRunAlone(program)


def checked(cfg: Config) -> Run:
    """The run, once every process finds that it can work, and that it is the same run."""
    seconds = cfg.cluster.slow_seconds or 1e6
    laid_out = elastic.choose_layout(cfg, seconds)
    run = processes.together("checks", seconds, lambda: Run(laid_out))
    about = lambda: f"{to_json(run.cfg)} {run.first_step} {jax.__version__}"  # noqa: E731
    processes.check_same("config", about, seconds)
    processes.check_same("data set", lambda: run.content, seconds)
    processes.check_same(SKIPPED_FILE, lambda: repr(run.loader.skipped), seconds)
    return run


def opened(run: Run, environment: list[str]) -> RunLock | None:
    """Take the run folder and write what the run is, in process 0, which alone has the lock.

    Raises:   Taken; RunError when the folder is not what was checked; PeerFailed for either.
    """
    seconds = run.cfg.cluster.slow_seconds or 1e6

    def take() -> RunLock | None:
        if processes.own() != 0:
            return None
        lock = RunLock(run.dir, min(WAIT_SECONDS, seconds / 2))  # else the watchdog ends it
        try:
            if checkpoint.starting_step(run.cfg) != run.first_step:
                rule = "has got another checkpoint meanwhile, by a run that has just ended"
                raise guard.RunError(f"run.dir {run.cfg.run.dir} {rule}. Fix: start again")
            run.open_folder([*environment, *lock.warnings])
        except BaseException:
            lock.release()
            raise
        return lock

    return processes.together("run folder", seconds, take)


def run_to_end(cfg: Config, environment: list[str]) -> int:
    """Check, open the run folder and train, watched. Returns an exit code.

    Raises:   Taken, among others: when the watchdog has left off, whose last words would lie in
              the folder of the run that has it.
    """
    c = cfg.cluster
    with listening(), Watchdog(cfg.run.dir, c.hang_seconds, c.slow_seconds) as watch:
        run = checked(cfg)
        try:
            lock = opened(run, environment)
        except (Taken, processes.PeerFailed) as error:
            taken = error
        else:
            with lock or contextlib.nullcontext():
                return train(run, watch)
    raise taken


def main(argv: Sequence[str]) -> int:
    """The command line."""
    cfg = cli.read_config(argv, "jaxpar.train", __doc__)
    return run_to_end(*processes.join(cfg))


if __name__ == "__main__":
    cli.run_program(main)
