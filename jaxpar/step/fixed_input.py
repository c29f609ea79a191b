"""A program whose last argument is always the same, called without it."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.config import Config
from jaxpar.optimizer.schedules import rate_table


class FixedInput:
    """A jitted function, what it is lowered to, or what that is compiled to, whose last argument is
    `value`. All else is as without it."""

    def __init__(self, program: Any, value: np.ndarray, sharding: NamedSharding):
        """Args:     program: called as (*args, value). sharding: of `value` on the devices."""
        self._program, self._value, self._sharding = program, value, sharding

    @functools.cached_property
    def _placed(self) -> jax.Array:
        value = self._value
        return jax.make_array_from_callback(value.shape, self._sharding, lambda at: value[at])

    def __call__(self, *args: Any) -> Any:
        return self._program(*args, self._placed)

    def with_value(self, value: np.ndarray) -> "FixedInput":
        """Return the same program, with another value of the same shape."""
        return FixedInput(self._program, value, self._sharding)

    def lower(self, *args: Any) -> "FixedInput":
        """As `jax.stages.Wrapped.lower`."""
        like = jax.ShapeDtypeStruct(self._value.shape, self._value.dtype, sharding=self._sharding)
        return self._with(self._program.lower(*args, like))

    def compile(self, *options: Any) -> "FixedInput":
        """As `jax.stages.Lowered.compile`."""
        return self._with(self._program.compile(*options))

    def _with(self, program: Any) -> "FixedInput":
        return FixedInput(program, self._value, self._sharding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def with_rates(step: Any, cfg: Config, everywhere: NamedSharding) -> FixedInput:
    """Return a train step whose last argument is the table of the run's learning rates."""
    return FixedInput(step, rate_table(cfg.optimizer, cfg.train.num_steps), everywhere)
