"""The train step of a run: a program for each size of steps, compiled before its first use.

With DiLoCo, the outer steps that are due belong to the step. With an overlap, a size has some more
programs: a step may exchange an outer gradient beside its own work (`step/diloco/overlap.py`).

A program is compiled between two steps, not beside them: XLA times matmul kernels on the devices,
and steps would disturb its measurements.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jaxpar.config import Config
from jaxpar.config.lists.step_sizes import in_words
from jaxpar.execution.decisions import execution_of
from jaxpar.runtime.compilation import CacheReads
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.stages import stage
from jaxpar.sharding.batch import Batch
from jaxpar.step.compiled import FirstRunAlone, check_host_memory, memory_of
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.diloco.overlap import programs_of_steps, same_program
from jaxpar.step.diloco.schedule import under_way
from jaxpar.step.identity import identity
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import LAYERS, make_train_step
from jaxpar.training.run import Run
from jaxpar.training.step_guard import require_recorded

#: The shape of a batch, the fragment whose outer gradient a step exchanges, and whether it measures
#: layers.
type Key = tuple[tuple[int, int], int | None, bool]


class StepPrograms:
    """The train step of a run, for batches of every size."""

    def __init__(self, run: Run, alone: Callable[[], AbstractContextManager[None]] = nullcontext):
        """Args:     alone: as in `FirstRunAlone`."""
        self._run, self._alone = run, alone
        self.outer_steps = OuterSteps(run.cfg, run.mesh)
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
        for fragment, layers in itertools.product(programs_of_steps(cfg), _variants(cfg)):
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
        fragment = under_way(done, cfg)
        same = None if fragment is None else same_program(cfg, fragment)
        self._latest = batch.tokens.shape, same, _measures_layers(cfg, done)
        state, metrics = self._programs[self._latest](state, self._run.taught(batch))
        return self.outer_steps(done + 1, state), metrics


def _variants(cfg: Config) -> tuple[bool, ...]:
    """Return whether layers are measured, for each program of a size of steps."""
    some = cfg.metrics.layers_every > 1 and (cfg.train.probes or cfg.metrics.layers != "none")
    return (True, False) if some else (True,)


def _measures_layers(cfg: Config, done: int) -> bool:
    """Return whether the step after `done` steps takes the program that measures layers."""
    number, last = done + 1, cfg.train.num_steps
    return len(_variants(cfg)) == 1 or number % cfg.metrics.layers_every == 0 or number == last


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
