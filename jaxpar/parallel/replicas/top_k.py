"""The sum over replicas of each one's largest elements, as values and places."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.take_largest import take_largest
from jaxpar.parallel.collectives import all_gather_invariant
from jaxpar.sharding.axes import REPLICA

#: Elements of a group: groups of 1,024 cost loss (docs/experiments/slow_links.md), and places of 16
#: bits tell 65,536 apart. If less than `FEWEST_SENT` of the smallest would be sent, groups double.
MIN_GROUP, MAX_GROUP, FEWEST_SENT = 1 << 13, 1 << 16, 8

#: Bytes of an element that is sent: a float32 value and its place in the group.
BYTES = 4 + 2


def groups_of(size: int, ratio: float) -> tuple[int, int, int]:
    """Return the number of groups of an array, the elements of each, and how many of them to send.

    The last group may end with padding.
    """
    group = MIN_GROUP
    while group < MAX_GROUP and ratio * group < FEWEST_SENT:
        group *= 2
    group = min(group, size)
    return -(-size // group), group, max(1, round(ratio * group))


def sum_top_k(x: jax.Array, ratio: float) -> tuple[jax.Array, jax.Array]:
    """Sum the largest elements over replicas, and return the others.

    Each replica chooses the elements of largest magnitude in every group of neighboring elements.

    Args:     x: float32, any shape. ratio: share of the elements to send.
    Returns:  (the sum, the same on every replica; this replica's error: x without what was sent).
    Communication: two all-gathers over REPLICA, of float32 values and of their places, in 16 bits.
    Source:   Stich et al. 2018 (1809.07599), algorithm 1; Lin et al. 2018 (1712.01887).
    """
    groups, group, k = groups_of(x.size, ratio)
    values, places, left = take_largest(x.reshape(-1), group, k)
    rows = jnp.arange(groups)[:, None]
    all_values = all_gather_invariant(values[None], (REPLICA,), 0)
    sent_places = places.astype(jnp.uint16)[None]
    all_places = all_gather_invariant(sent_places, (REPLICA,), 0).astype(jnp.int32)

    def add(r: Any, total: jax.Array) -> jax.Array:
        return total.at[rows, all_places[r]].add(all_values[r], unique_indices=True)

    # One replica after another: places of several coincide, and the order of a sum matters.
    first = add(0, jnp.zeros((groups, group), jnp.float32))
    total = lax.fori_loop(1, lax.axis_size(REPLICA), add, first)
    return total.reshape(-1)[: x.size].reshape(x.shape), left.reshape(x.shape)
