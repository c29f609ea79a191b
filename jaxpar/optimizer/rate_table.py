"""The learning rates of a run as an array, which a compiled step takes as an input.

A schedule in the step is compiled into it. Runs that differ in their schedule then compile a
program each, though the programs differ in a few constants. With `optimizer.schedule_as_input`, all
of them use one program, and the rate of update i is entry i of the array.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.config import OptimizerConfig
from jaxpar.optimizer.schedules import learning_rate

#: The length of the array is this, or a larger power of two: runs of various lengths share it.
MIN_LENGTH = 1024


def rate_table(cfg: OptimizerConfig, num_steps: int) -> np.ndarray:
    """Return the learning rate of each update, float32 [a power of two above `num_steps`].

    Computed on the host's CPU, if JAX may use it.
    """
    length = max(MIN_LENGTH, 1 << num_steps.bit_length())
    cpu = None
    with contextlib.suppress(RuntimeError):
        cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        rates = jax.vmap(learning_rate(cfg, num_steps))(jnp.arange(length))
        return np.asarray(jnp.broadcast_to(rates, length), np.float32)


def schedule_of(rates: jax.Array) -> optax.Schedule:
    """Return the schedule of a table of rates."""
    return lambda count: rates[jnp.minimum(count, len(rates) - 1)]
