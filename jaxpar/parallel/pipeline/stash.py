"""The activation stash: what forwards leave for the backwards of the microbatches in flight.

A ring of slots for each array: under `residuals`, those of each segment's pullback; under `inputs`,
the chunk's input, from which the backward computes the chunk again. The i-th forward writes slot
i mod `Schedule.stash_size`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.parallel.staged_model import take


def empty(types: Any, num_slots: int) -> Any:
    """Slots for values of these types.

    Slots on the device start as memory is found: zeros would be tens of GB that every step writes.
    An idle stage reads the slot of its first or last action, which has been written by then.
    """
    return jax.tree.map(partial(_empty, num_slots), types)


def _empty(num_slots: int, aval: Any) -> jax.Array:
    shape = (num_slots, *aval.shape)
    if aval.memory_space != jax.memory.Space.Device:  # saved there by the remat policy
        return jax.device_put(varying(jnp.zeros(shape, aval.dtype)), aval.memory_space)
    return varying(lax.empty(shape, aval.dtype))


def residual_types(vjps_of: Callable[[jax.Array], list[Any]], x: jax.Array) -> list[list[Any]]:
    """Types of the residuals of each pullback. (`eval_shape` returns no memory space under
    shard_map.)

    Args:     vjps_of: a chunk's input -> the pullbacks of its segments.
    """
    types: list[list[Any]] = []

    def note(x: jax.Array) -> None:
        for vjp in vjps_of(x):
            types.append(list(map(jax.typeof, jax.tree.leaves(vjp))))

    jax.eval_shape(note, x)
    return types


def put(stash: Any, values: Any, i: jax.Array, schedule: Schedule, num_slots: int) -> Any:
    """The stash with the values of the i-th forward; those of an idle slot go to the last slot."""
    valid = (i >= 0) & (i < schedule.num_actions)
    slot = jnp.where(valid, i % schedule.stash_size, num_slots - 1)
    write = lambda r, a: lax.dynamic_update_index_in_dim(r, a, slot, 0)  # noqa: E731
    return jax.tree.map(write, stash, varying(values))


def get(stash: Any, forward: jax.Array, schedule: Schedule) -> Any:
    """The values of a forward, by its number."""
    return take(stash, forward % schedule.stash_size)
