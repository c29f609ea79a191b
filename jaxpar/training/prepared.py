"""What the training loop needs, made before its first step: programs, and memory for saves."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax

from jaxpar import checkpoint
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.fingerprint import compile_fingerprints
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.replica_check import ReplicaCheck
from jaxpar.step.state import (
    TrainState,
    abstract_snapshot,
    compile_averaged,
    compile_snapshot,
    without_values,
)
from jaxpar.training.evaluating.evaluation import Evaluation
from jaxpar.training.frozen import chosen as weights
from jaxpar.training.run import Run
from jaxpar.training.step_programs import StepPrograms


@dataclass(frozen=True)
class Prepared:
    """The programs that the loop runs, and memory that its saves will need."""

    train_step: StepPrograms
    evaluation: Evaluation
    outer_steps: OuterSteps
    replicas: ReplicaCheck
    host: checkpoint.HostCopy
    memory: MemoryCheckpointer | None


@contextlib.contextmanager
def prepared(
    run: Run,
    state: TrainState,
    compile_step: Callable[..., FirstRunAlone],
) -> Iterator[Prepared]:
    """Compile the train step for the first size, and whatever evaluations, checks and saves run.

    Programs that only hash and copy are compiled on a thread, while XLA compiles the train step.
    The evaluation follows: XLA times matmul kernels on the devices, so two compilations at a time
    would disturb each other's measurements. It also reuses what was measured for the train step.
    Memory for saves is allocated on another thread, which may continue beside the first steps.

    Args:     compile_step: `loop.compiled`. Calls its fourth argument when XLA starts:
              earlier, tracing on the thread would slow down that of the train step, since Python
              runs one thread at a time.
    """
    cfg, like = run.cfg, jax.tree.map(without_values, state)
    saved = abstract_snapshot(state, run.cfg, run.mesh).saved
    with checkpoint.HostCopy(saved) as host, _memory(run) as memory:
        evaluation = Evaluation(cfg, run.mesh, run.held_out, run.max_segments, host.paused)
        outer_steps, replicas = OuterSteps(cfg, run.mesh), ReplicaCheck(cfg, run.mesh)

        def others() -> jax.stages.Lowered | None:
            compile_fingerprints(saved)
            compile_snapshot(like)
            compile_averaged(like)
            outer_steps.compile(like)
            if cfg.guard.replica_check_every:
                replicas.compile(like)
            run.prepare_metrics()
            return evaluation.lower(like.params)

        def beside() -> None:
            if cfg.checkpoint.every:
                host.begin()
            if memory is not None:
                memory.begin()
            waiting.append(thread.submit(others))

        waiting: list[Future[jax.stages.Lowered | None]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
            compile_for = functools.partial(compile_step, run)
            train_step = StepPrograms(compile_for, run.config_of, host.paused)
            train_step.prepare(state, run.loader.abstract_batch(run.first_step or 0), beside)
            with stage("compiling the programs of evaluations and saves"):
                lowered = waiting[0].result()
                if lowered is not None:
                    lowered.compile()  # JAX keeps it for calls
        peers.any_process(False)  # a collective would fail while another process still compiles
        run.startup.ended("compilation")
        yield Prepared(train_step, evaluation, outer_steps, replicas, host, memory)


@contextlib.contextmanager
def _memory(run: Run) -> Iterator[MemoryCheckpointer | None]:
    """Open the run's copies in memory; None if it keeps none."""
    if run.memory is None:
        yield None
        return
    restored = run.copies[0].group if run.copies else None
    taken = weights.to_json(run.weights_from)
    with MemoryCheckpointer(run.cfg, run.memory, restored, log, run.asked, taken) as memory:
        yield memory
