"""Sums over packed pairs of responses, on local shards of a batch.

A row of the batch holds some pairs, each as two documents: the chosen response with its prompt, and
then the rejected one with the same prompt. Document masking keeps them apart, and their labels are
those of the responses alone. A row is never split over BATCH_AXES, but its tokens are over
SEQUENCE, in any order.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import SEQUENCE
from jaxpar.sharding.batch import IGNORED, Batch


def by_response(x_BT: jax.Array, batch: Batch, max_pairs: int, mean: bool = False) -> jax.Array:
    """Sum values of labels over each response: float32 [B, max_pairs, 2], chosen and rejected.

    Args:
        max_pairs: most pairs in a row.
        mean: divide by the number of labels.
    Communication: an all-reduce over SEQUENCE of [B, 2 max_pairs] float32; two for means.
    """
    sums = psum(_by_segment(x_BT, batch.segment_ids, 2 * max_pairs), SEQUENCE)
    if mean:
        labels = (batch.labels != IGNORED).astype(jnp.float32)
        count = psum(_by_segment(labels, batch.segment_ids, 2 * max_pairs), SEQUENCE)
        sums = sums / jnp.maximum(count, 1)
    return sums.reshape(len(sums), max_pairs, 2)


def present(batch: Batch, max_pairs: int) -> jax.Array:
    """Return which pairs of each row there are, bool [B, max_pairs].

    Communication: an all-reduce over SEQUENCE of [B] int32.
    """
    return jnp.arange(max_pairs) < psum(_starts_of_pairs(batch), SEQUENCE)[:, None]


def totals(of_pairs: jax.Array, here: jax.Array) -> jax.Array:
    """Sum values [N, B, max_pairs] over the pairs that are `present`: [N]; zeros on all ranks of
    SEQUENCE but the first."""
    # Every rank of SEQUENCE knows all pairs of its rows: the first one counts them.
    counted = here & (lax.axis_index(SEQUENCE) == 0)
    return jnp.sum(jnp.where(counted, of_pairs, 0.0), axis=(1, 2))


def _by_segment(x_BT: jax.Array, segments_BT: jax.Array, n: int) -> jax.Array:
    """Sum the values of each segment, which are numbered from 1: float32 [B, n].

    As masked sums, since a matrix product may round, and a scatter may add in any order.
    """
    numbers = jnp.arange(1, n + 1, dtype=jnp.int32)
    mine = segments_BT[:, None, :] == numbers[:, None]
    return jnp.sum(jnp.where(mine, x_BT[:, None, :], 0.0), axis=2)


def _starts_of_pairs(batch: Batch) -> jax.Array:
    """Count the pairs of each row that start on this device, int32 [B]."""
    starts = (batch.positions == 0) & (batch.segment_ids % 2 == 1)
    return jnp.sum(starts, axis=1, dtype=jnp.int32)


def count_pairs(batch: Batch) -> jax.Array:
    """Count the pairs that start on this device, int32 scalar."""
    return jnp.sum(_starts_of_pairs(batch), dtype=jnp.int32)
