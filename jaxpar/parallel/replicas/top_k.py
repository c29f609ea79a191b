"""The sum over replicas of each one's largest elements, as values and places."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather_invariant
from jaxpar.sharding.axes import REPLICA

#: Elements of a group, at most: places in it are numbers of 16 bits.
GROUP = 1 << 16

#: Bytes of an element that is sent: a float32 value and its place in the group.
BYTES = 4 + 2


def groups_of(size: int, ratio: float) -> tuple[int, int, int]:
    """Return the number of groups of an array, the elements of each, and how many of them to send.

    Groups are equal, so the last one may end with padding.
    """
    groups = -(-size // GROUP)
    each = -(-size // groups)
    return groups, each, max(1, round(ratio * each))


def sum_top_k(x: jax.Array, ratio: float) -> tuple[jax.Array, jax.Array]:
    """Sum the largest elements over replicas, and return the others.

    Each replica chooses the elements of largest magnitude in every group of neighboring elements.

    Args:     x: float32, any shape. ratio: share of the elements to send.
    Returns:  (the sum, the same on every replica; this replica's error: x without what was sent).
    Communication: two all-gathers over REPLICA, of float32 values and of their places, in 16 bits.
    Source:   Stich et al. 2018 (1809.07599), algorithm 1; Lin et al. 2018 (1712.01887).
    """
    groups, each, k = groups_of(x.size, ratio)
    grouped = jnp.pad(x.reshape(-1), (0, groups * each - x.size)).reshape(groups, each)
    _, places = lax.top_k(jnp.abs(grouped), k)
    rows = jnp.arange(groups)[:, None]
    values = jnp.take_along_axis(grouped, places, axis=1)
    all_values = all_gather_invariant(values[None], (REPLICA,), 0)
    sent_places = places.astype(jnp.uint16)[None]
    all_places = all_gather_invariant(sent_places, (REPLICA,), 0).astype(jnp.int32)

    def add(r: Any, total: jax.Array) -> jax.Array:
        return total.at[rows, all_places[r]].add(all_values[r], unique_indices=True)

    # One replica after another: places of several coincide, and the order of a sum matters.
    first = add(0, jnp.zeros(grouped.shape, jnp.float32))
    total = lax.fori_loop(1, lax.axis_size(REPLICA), add, first)
    left = grouped.at[rows, places].set(0, unique_indices=True)
    flat = lambda a: a.reshape(-1)[: x.size].reshape(x.shape)  # noqa: E731
    return flat(total), flat(left)
