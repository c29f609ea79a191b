"""What the training loop needs, made before its first step: programs, and memory for saves."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar import checkpoint
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
from jaxpar.monitoring.sinks import import_packages
from jaxpar.optimizer.schedules import learning_rate, on_host
from jaxpar.planning.forecast import Forecast, forecast_here
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.fingerprint import compile_fingerprints
from jaxpar.step.replica_check import ReplicaCheck
from jaxpar.step.state import (
    abstract_snapshot,
    compile_averaged,
    compile_snapshot,
    without_values,
)
from jaxpar.training.evaluating.evaluation import Evaluation
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.run import Run, Start
from jaxpar.training.step_programs import StepPrograms


@dataclass(frozen=True)
class Prepared:
    """The programs that the loop runs, and memory that its saves will need."""

    train_step: StepPrograms
    evaluation: Evaluation
    replicas: ReplicaCheck
    host: checkpoint.HostCopy
    memory: MemoryCheckpointer | None
    schedule: Callable[[int], float]
    """The learning rate after a number of updates."""
    forecast: Forecast | None


@contextlib.contextmanager
def programs_of(run: Run, start: Start, record: Callable[..., None]) -> Iterator[Prepared]:
    """Compile the train step for the first size, and whatever evaluations, checks and saves run.

    Programs that only hash and copy are compiled on a thread, while XLA compiles the train step.
    The evaluation follows: XLA times matmul kernels on the devices, so two compilations at a time
    would disturb each other's measurements. It also reuses what was measured for the train step.
    Memory for saves is allocated on another thread, which may continue beside the first steps.

    The thread begins when XLA starts: earlier, tracing on it would slow down that of the train
    step, since Python runs one thread at a time.

    Args:     record: called with events.
    """
    cfg, like = run.cfg, jax.tree.map(without_values, start.state)
    saved = abstract_snapshot(start.state, run.cfg, run.mesh).saved
    with checkpoint.HostCopy(saved) as host, _memory(run, start, record) as memory:
        evaluation = Evaluation(cfg, run.mesh, run.held_out, run.max_segments, host.paused)
        train_step, replicas = StepPrograms(run, host.paused), ReplicaCheck(cfg, run.mesh)

        def others() -> tuple[jax.stages.Lowered | None, Callable[[int], float], Forecast | None]:
            compile_fingerprints(saved)
            compile_snapshot(like)
            compile_averaged(like)
            train_step.outer_steps.compile(like)
            if cfg.guard.replica_check_every:
                replicas.compile(like)
            import_packages(cfg)
            schedule = on_host(learning_rate(cfg.optimizer, cfg.train.num_steps))
            return evaluation.lower(like.params), schedule, forecast_here(cfg)

        def beside() -> None:
            if cfg.checkpoint.every:
                host.begin()
            if memory is not None:
                memory.begin()
            waiting.append(thread.submit(others))

        waiting: list[Future[Any]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
            example = run.loader.abstract_batch(start.step or 0)
            train_step.prepare(start.state, example, beside)
            with stage("compiling the programs of evaluations and saves"):
                lowered, schedule, forecast = waiting[0].result()
                if lowered is not None:
                    lowered.compile()  # JAX keeps it for calls
        peers.any_process(False)  # a collective would fail while another process still compiles
        run.startup.ended("compilation")
        yield Prepared(train_step, evaluation, replicas, host, memory, schedule, forecast)


@contextlib.contextmanager
def _memory(
    run: Run, start: Start, record: Callable[..., None]
) -> Iterator[MemoryCheckpointer | None]:
    """Open the run's copies in memory; None if it keeps none."""
    if run.memory is None:
        yield None
        return
    restored = start.copy.group if start.copy is not None else None
    taken = weights.to_json(run.weights_from)
    with MemoryCheckpointer(run.cfg, run.memory, restored, log, run.asked, taken) as memory:
        memory.record = record
        yield memory
