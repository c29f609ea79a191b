"""Recurrences over a sequence that is sharded over the SEQUENCE axis, in text order.

Each shard of the sequence changes a recurrence's state by an affine map, whatever the state was. So
a device learns its first state from the maps of the devices before it, whose size does not depend
on the length of the sequence.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather, shift, varying
from jaxpar.sharding.axes import SEQUENCE


def is_split() -> bool:
    """Return whether sequences are split over devices."""
    return lax.axis_size(SEQUENCE) > 1


def tokens_before(x: jax.Array, count: int) -> jax.Array:
    """Return the last tokens of the previous shard of the sequence; zeros without one.

    The first shard gets tokens of the last one: whoever reads them knows from positions that they
    are not of the same document.

    Args:     x: [B, T/sequence, C], with at least `count` tokens.
    Returns:  [B, count, C].
    Communication: a permute over SEQUENCE; its transpose is one back.
    """
    if not is_split():
        return varying(jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype))
    return shift(x[:, x.shape[1] - count :], SEQUENCE, 1)


def state_before[State](change: Any, apply: Callable[[Any, State], State], nothing: State) -> State:
    """Return the state after all earlier shards of the sequence.

    Args:     change: arrays of this shard's affine map of the state. apply: (change, state) -> the
              state after that shard. nothing: the state before the first token.
    Communication: an all-gather over SEQUENCE of `change`, a reduce-scatter in the backward.
    """
    n, here = lax.axis_size(SEQUENCE), lax.axis_index(SEQUENCE)
    changes = jax.tree.map(lambda a: all_gather(a[None], SEQUENCE, 0), change)
    state = nothing
    for shard in range(n - 1):
        after = apply(jax.tree.map(lambda a: a[shard], changes), state)  # noqa: B023
        state = jax.tree.map(lambda a, b: jnp.where(shard < here, a, b), after, state)  # noqa: B023
    return state
