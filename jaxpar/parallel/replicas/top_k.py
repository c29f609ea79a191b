"""The sum over replicas of each one's largest elements, as values and places."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.take_largest import take_largest
from jaxpar.parallel.collectives import all_gather_invariant
from jaxpar.sharding.axes import REPLICA

#: Elements of a group: places of 16 bits tell 65,536 apart. If less than `FEWEST_SENT` of the
#: smallest would be sent, groups double.
MIN_GROUP, MAX_GROUP, FEWEST_SENT = 1 << 13, 1 << 16, 8

#: Neighboring elements of a group: 128 bytes, which a GPU reads together.
COLUMNS = 32

#: Bytes of an element that is sent: a float32 value and its place in the group.
BYTES = 4 + 2


class Groups(NamedTuple):
    """The groups of an array: each has `columns` neighbors in each of `rows` equal parts of it."""

    number: int
    rows: int
    columns: int
    sent: int
    """Elements of a group that are sent."""


def groups_of(size: int, ratio: float) -> Groups:
    """Return the groups of an array. Padding completes the last part.

    Gradients differ between rows of a table and between layers. So a group has elements from all
    over the array, and the largest of each group are nearly the largest of all.
    """
    group = MIN_GROUP
    while group < MAX_GROUP and ratio * group < FEWEST_SENT:
        group *= 2
    if size <= group:
        return Groups(1, 1, size, max(1, round(ratio * size)))
    return Groups(-(-size // group), group // COLUMNS, COLUMNS, max(1, round(ratio * group)))


def sum_top_k(x: jax.Array, ratio: float) -> tuple[jax.Array, jax.Array]:
    """Sum the largest elements over replicas, and return the others.

    Each replica chooses the elements of largest magnitude in every group.

    Args:     x: float32, any shape. ratio: share of the elements to send.
    Returns:  (the sum, the same on every replica; this replica's error: x without what was sent).
    Communication: two all-gathers over REPLICA, of float32 values and of their places, in 16 bits.
    Source:   Stich et al. 2018 (1809.07599), algorithm 1; Lin et al. 2018 (1712.01887).
    """
    groups = groups_of(x.size, ratio)
    padding = groups.number * groups.rows * groups.columns - x.size
    parts = jnp.pad(x.reshape(-1), (0, padding)).reshape(groups.rows, -1)
    values, places, left = take_largest(parts, groups.columns, groups.sent)
    begins = groups.columns * jnp.arange(groups.number)[:, None]
    all_values = all_gather_invariant(values[None], (REPLICA,), 0)
    sent_places = places.astype(jnp.uint16)[None]
    all_places = all_gather_invariant(sent_places, (REPLICA,), 0).astype(jnp.int32)

    def add(r: Any, total: jax.Array) -> jax.Array:
        row, column = jnp.divmod(all_places[r], groups.columns)
        return total.at[row, begins + column].add(all_values[r], unique_indices=True)

    # One replica after another: places of several coincide, and the order of a sum matters.
    first = add(0, jnp.zeros(parts.shape, jnp.float32))
    total = lax.fori_loop(1, lax.axis_size(REPLICA), add, first)
    in_shape = lambda a: a.reshape(-1)[: x.size].reshape(x.shape)  # noqa: E731
    return in_shape(total), in_shape(left)
