"""The programs of the train step: one for each size of steps, compiled before its first use.

A program is compiled between two steps, not beside them: XLA times matmul kernels on the devices,
and steps would disturb its measurements.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jaxpar.config import Config
from jaxpar.sharding.batch import Batch
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import StepMetrics

#: Compiles the train step for a state and a batch. Calls its last argument when XLA starts.
type Compile = Callable[[TrainState, Batch, Callable[[], None]], FirstRunAlone]


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
        self._programs: dict[tuple[int, int], FirstRunAlone] = {}
        self._latest = 0, 0

    def has(self, batch: Batch) -> bool:
        """Return whether the program for batches of this size is compiled."""
        return batch.tokens.shape in self._programs

    def prepare(
        self, state: TrainState, batch: Batch, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Compile the program for batches of this size.

        Args:     batch: may be abstract. meanwhile: called when XLA starts to compile.
        """
        program = self._compile(state, batch, meanwhile)
        program.alone, self._latest = self._alone, batch.tokens.shape
        self._programs[self._latest] = program

    @property
    def cfg(self) -> Config:
        """The config of the latest step and all others of its size."""
        return self._config_of(*self._latest)

    @property
    def program(self) -> Any:
        """The compiled program of the latest step."""
        return self._programs[self._latest].program

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step with the program for batches of this size."""
        self._latest = batch.tokens.shape
        return self._programs[self._latest](state, batch)
