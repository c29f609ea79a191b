"""The programs of a run, compiled before their first use: its train steps, evaluations and saves.

There is a train step for each size of steps. With DiLoCo, the outer steps that are due belong to
the step. With an overlap, a size has some more programs: a step may exchange an outer gradient
beside its own work (`step/diloco/overlap.py`).

A program is compiled between two steps, not beside them: XLA times matmul kernels on the devices,
and steps would disturb its measurements.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxpar.checkpoint.copies import HostCopy
from jaxpar.config import Config
from jaxpar.config.lists.step_sizes import in_words
from jaxpar.execution.decisions import execution_of
from jaxpar.monitoring.sinks import import_packages
from jaxpar.optimizer.schedules import learning_rate, on_host
from jaxpar.prediction.startup import Forecast, forecast_here
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.fingerprint import compile_fingerprints
from jaxpar.step.compiled import FirstRunAlone, check_host_memory, memory_of
from jaxpar.step.identity import identity
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import (
    TrainState,
    abstract_snapshot,
    compile_averaged,
    compile_snapshot,
    without_values,
)
from jaxpar.step.train_step import LAYERS, make_train_step
from jaxpar.training import chosen as weights
from jaxpar.training.evaluation import Evaluation
from jaxpar.training.run import Run, Start
from jaxpar.training.step_guard import require_recorded

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
    from jaxpar.step.diloco.outer import OuterSteps
    from jaxpar.step.replica_check import ReplicaCheck

#: The shape of a batch, the fragment whose outer gradient a step exchanges, and whether it measures
#: layers.
type Key = tuple[tuple[int, int], int | None, bool]


class StepPrograms:
    """The train step of a run, for batches of every size."""

    def __init__(self, run: Run, alone: Callable[[], AbstractContextManager[None]] = nullcontext):
        """Args:     alone: as in `FirstRunAlone`."""
        self._run, self._alone = run, alone
        self.outer_steps = _outer_steps(run)
        self._programs: dict[Key, FirstRunAlone] = {}
        self._latest: Key = (0, 0), None, True

    def has(self, batch: Batch) -> bool:
        """Return whether the programs for batches of this size are compiled."""
        return (batch.tokens.shape, None, True) in self._programs

    def has_run(self, batch: Batch) -> bool:
        """Return whether a step of this size has been taken."""
        shape = batch.tokens.shape
        return any(key[0] == shape and one.has_run for key, one in self._programs.items())

    def prepare(
        self, state: TrainState, batch: Batch, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Compile the programs for batches of this size.

        Args:     batch: may be abstract. meanwhile: called when XLA starts to compile.
        """
        shape = batch.tokens.shape
        cfg = self._run.config_of(*shape)
        for fragment, layers in itertools.product(_fragments(cfg), _variants(cfg)):
            program = compiled(self._run, state, batch, meanwhile, fragment, layers)
            program.alone, meanwhile = self._alone, lambda: None
            self._programs[shape, fragment, layers] = program
        self._latest = shape, None, True

    @property
    def cfg(self) -> Config:
        """The config of the latest step and all others of its size."""
        return self._run.config_of(*self._latest[0])

    @property
    def program(self) -> Any:
        """The compiled program of the latest step."""
        return self._programs[self._latest].program

    def __call__(self, state: TrainState, batch: Batch, done: int) -> tuple[TrainState, Metrics]:
        """Take a step with the program for batches of this size, and the outer steps due after it.

        Args:     done: steps taken before.
        """
        cfg = self._run.config_of(*batch.tokens.shape)
        self._latest = batch.tokens.shape, _exchanged(done, cfg), _measures_layers(cfg, done)
        state, metrics = self._programs[self._latest](state, self._run.supplemented(batch))
        if self.outer_steps is not None:
            state = self.outer_steps(done + 1, state)
        return state, metrics


def _outer_steps(run: Run) -> "OuterSteps | None":
    """Return the programs of DiLoCo's outer steps, which only such a run imports."""
    if not run.cfg.diloco:
        return None
    from jaxpar.step.diloco.outer import OuterSteps

    return OuterSteps(run.cfg, run.mesh)


def _fragments(cfg: Config) -> list[int | None]:
    """Return the fragments of which steps exchange the outer gradient; None: one without."""
    if not (cfg.diloco and cfg.diloco.overlap):
        return [None]
    from jaxpar.step.diloco.overlap import programs_of_steps

    return programs_of_steps(cfg)


def _exchanged(done: int, cfg: Config) -> int | None:
    """Return the fragment of the program that takes the step after `done` steps."""
    if not (cfg.diloco and cfg.diloco.overlap):
        return None
    from jaxpar.step.diloco.overlap import same_program, under_way

    fragment = under_way(done, cfg)
    return None if fragment is None else same_program(cfg, fragment)


def _variants(cfg: Config) -> tuple[bool, ...]:
    """Return whether layers are measured, for each program of a size of steps."""
    some = cfg.metrics.layers_every > 1 and (cfg.train.probes or cfg.metrics.layers != "none")
    return (True, False) if some else (True,)


def _measures_layers(cfg: Config, done: int) -> bool:
    """Return whether the step after `done` steps takes the program that measures layers."""
    number, last = done + 1, cfg.train.num_steps
    return len(_variants(cfg)) == 1 or number % cfg.metrics.layers_every == 0 or number == last


#: How many programs each thread has read from JAX's compilation cache.
_cache_reads: Counter[int] = Counter()


@functools.cache
def _count_cache_reads() -> None:
    """Listen to JAX's events, once: JAX cannot remove a listener."""

    def count(event: str, **_: Any) -> None:
        _cache_reads[threading.get_ident()] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(count)


def compiled(
    run: Run,
    state: TrainState,
    batch: Batch,
    meanwhile: Callable[[], None] = lambda: None,
    fragment: int | None = None,
    layers: bool = True,
) -> FirstRunAlone:
    """Compile the train step for one size of steps before its first use, and log the time.

    Args:     batch: an example, which may be abstract. meanwhile: called when XLA starts to
              compile; should return at once. fragment: as in `make_train_step`. layers: whether the
              step measures layers, if it can.
    """
    began = time.perf_counter()
    cfg, record = run.config_of(*batch.tokens.shape), bool(run.cfg.run.record_routing)
    which = "" if cfg == run.cfg else f" for {in_words(cfg)}"
    which += "" if fragment is None else f" with the exchange of fragment {fragment}"
    which += "" if layers else ", without metrics of layers"
    step: Any = make_train_step(
        cfg,
        run.mesh,
        run.max_segments,
        execution_of(cfg),
        requested=("expert_rows", *(["routing"] if record else []), *([LAYERS] if layers else [])),
        fragment=fragment,
    )
    with stage("compiling the train step") as now:
        lowered = step.lower(state, run.supplemented(batch))
        require_recorded(cfg, lowered.out_info[1])
        peers.check_same(f"program{which}", lambda: identity(lowered), run.cfg.cluster.slow_seconds)
        now.at("XLA")
        meanwhile()
        _count_cache_reads()
        before = _cache_reads[threading.get_ident()]
        program = lowered.compile()
        from_cache = _cache_reads[threading.get_ident()] > before
    run.startup.from_cache = from_cache
    # The first collective: from here on, no process is still compiling.
    check_host_memory(program, run.cfg, peers.any_process)
    how = "read from the compilation cache" if from_cache else "compiled"
    log(f"{how}{which} in {time.perf_counter() - began:.1f} s{memory_of(program, state)}")
    run.startup.ended("compilation")
    return FirstRunAlone(program)


def _replica_check(run: Run) -> "ReplicaCheck | None":
    if not run.cfg.guard.replica_check_every:
        return None
    from jaxpar.step.replica_check import ReplicaCheck

    return ReplicaCheck(run.cfg, run.mesh)


@dataclass(frozen=True)
class Prepared:
    """The programs that the loop runs, and memory that its saves will need."""

    train_step: StepPrograms
    evaluation: Evaluation
    replicas: "ReplicaCheck | None"
    """None for a run that does not compare its replicas."""
    host: HostCopy
    memory: "MemoryCheckpointer | None"
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
    with HostCopy(saved) as host, _memory(run, start, record) as memory:
        evaluation = Evaluation(cfg, run.mesh, run.held_out, run.max_segments, host.paused)
        train_step, replicas = StepPrograms(run, host.paused), _replica_check(run)

        def others() -> tuple[jax.stages.Lowered | None, Callable[[int], float], Forecast | None]:
            compile_fingerprints(saved)
            compile_snapshot(like)
            compile_averaged(like)
            if train_step.outer_steps is not None:
                train_step.outer_steps.compile(like)
            if replicas is not None:
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
) -> Iterator["MemoryCheckpointer | None"]:
    """Open the run's copies in memory; None if it keeps none."""
    if run.memory is None:
        yield None
        return
    from jaxpar.memory_checkpoint.writing import MemoryCheckpointer

    restored = start.copy.group if start.copy is not None else None
    taken = weights.to_json(run.weights_from)
    with MemoryCheckpointer(run.cfg, run.memory, restored, log, run.asked, taken) as memory:
        memory.record = record
        yield memory
