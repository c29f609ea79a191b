"""The activation stash: values saved by forwards for the backwards of microbatches in flight.

Each array has a ring of slots. With `residuals`, the arrays are the residuals of each segment's
pullback. With `inputs`, the stash holds the chunk's input, and the backward recomputes the chunk.
The i-th forward writes slot i mod `PipelineSchedule.stash_size`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.parallel.pipeline.schedules import PipelineSchedule
from jaxpar.parallel.staged_model import take


def empty(types: Any, num_slots: int) -> Any:
    """Create slots for values of these types.

    Slots on the device are uninitialized, because zeros would be tens of GB to write in every step.
    An idle stage reads the slot of its first or last action, which has been written by then.
    """
    return jax.tree.map(partial(_empty, num_slots), types)


def _empty(num_slots: int, aval: Any) -> jax.Array:
    shape = (num_slots, *aval.shape)
    if aval.memory_space != jax.memory.Space.Device:  # the remat policy saves it on the host
        return jax.device_put(varying(jnp.zeros(shape, aval.dtype)), aval.memory_space)
    return varying(lax.empty(shape, aval.dtype))


def residual_types(vjps_of: Callable[[jax.Array], list[Any]], x: jax.Array) -> list[list[Any]]:
    """Return the types of each pullback's residuals.

    (The result of `eval_shape` would have no memory spaces under `shard_map`.)

    Args:     vjps_of: a chunk's input -> the pullbacks of its segments.
    """
    types: list[list[Any]] = []

    def note(x: jax.Array) -> None:
        for vjp in vjps_of(x):
            types.append(list(map(jax.typeof, jax.tree.leaves(vjp))))

    jax.eval_shape(note, x)
    return types


def put(stash: Any, values: Any, i: jax.Array, schedule: PipelineSchedule, num_slots: int) -> Any:
    """Write the values of the i-th forward. Those of idle stages go to the last slot."""
    valid = (i >= 0) & (i < schedule.num_actions)
    slot = jnp.where(valid, i % schedule.stash_size, num_slots - 1)
    write = lambda r, a: lax.dynamic_update_index_in_dim(r, a, slot, 0)  # noqa: E731
    return jax.tree.map(write, stash, varying(values))


def get(stash: Any, forward: jax.Array, schedule: PipelineSchedule) -> Any:
    """Read the values of a forward, given its index."""
    return take(stash, forward % schedule.stash_size)
