"""The programs of the train step: one for each size of steps, compiled before its first use.

With an overlap of DiLoCo, a size has some more: a step may exchange an outer gradient beside its
own work (`step/diloco/overlap.py`).

A program is compiled between two steps, not beside them: XLA times matmul kernels on the devices,
and steps would disturb its measurements.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jaxpar.config import Config
from jaxpar.sharding.batch import Batch
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.diloco.overlap import programs_of_steps, same_program
from jaxpar.step.metrics import Metrics
from jaxpar.step.state import TrainState

#: Compiles the train step for a state, a batch and a fragment. Calls its third argument when XLA
#: starts.
type Compile = Callable[[TrainState, Batch, Callable[[], None], int | None], FirstRunAlone]

#: The shape of a batch, and the fragment whose outer gradient a step exchanges.
type Key = tuple[tuple[int, int], int | None]


class StepPrograms:
    """The train step, for batches of every size of a run."""

    def __init__(
        self,
        compile_for: Compile,
        config_of: Callable[[int, int], Config],
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Args:     config_of: returns the config of batches of a shape. alone: as in
        `FirstRunAlone`.
        """
        self._compile, self._config_of, self._alone = compile_for, config_of, alone
        self._programs: dict[Key, FirstRunAlone] = {}
        self._latest: Key = (0, 0), None

    def has(self, batch: Batch) -> bool:
        """Return whether the programs for batches of this size are compiled."""
        return (batch.tokens.shape, None) in self._programs

    def prepare(
        self, state: TrainState, batch: Batch, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Compile the programs for batches of this size.

        Args:     batch: may be abstract. meanwhile: called when XLA starts to compile.
        """
        shape = batch.tokens.shape
        for fragment in programs_of_steps(self._config_of(*shape)):
            program = self._compile(state, batch, meanwhile, fragment)
            program.alone, meanwhile = self._alone, lambda: None
            self._programs[shape, fragment] = program
        self._latest = shape, None

    @property
    def cfg(self) -> Config:
        """The config of the latest step and all others of its size."""
        return self._config_of(*self._latest[0])

    @property
    def program(self) -> Any:
        """The compiled program of the latest step."""
        return self._programs[self._latest].program

    def __call__(
        self, state: TrainState, batch: Batch, fragment: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """Take a step with the program for batches of this size.

        Args:     fragment: whose outer gradient the step exchanges a part of.
        """
        shape = batch.tokens.shape
        same = None if fragment is None else same_program(self._config_of(*shape), fragment)
        self._latest = shape, same
        return self._programs[self._latest](state, batch)
