"""The preference loss of packed pairs, on local shards of a batch.

A row of the batch holds some pairs, each as two documents: the chosen response with its prompt, and
then the rejected one with the same prompt. Document masking keeps them apart, and their labels are
those of the responses alone. A row is never split over BATCH_AXES, but its tokens are over
SEQUENCE, in any order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, present
from jaxpar.objectives import dpo, token_scores
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import SEQUENCE
from jaxpar.sharding.batch import IGNORED, Batch

type Tree = dict[str, Any]


@jax.named_scope("loss")
def head(
    top: Tree, x: jax.Array, batch: Batch, cfg: Config, max_pairs: int
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed preference loss of a microbatch, like `transformer.head`.

    Args:     batch: with `Batch.reference`. max_pairs: most pairs in a row.
    Returns:  (loss, [len(MEASURES)]: sums over pairs of `dpo.measures`), on the first rank of
              SEQUENCE; zeros on the others.
    Communication: that of `token_scores.log_probs`; all-reduces over SEQUENCE of [B, 2 max_pairs]
              float32 and [B] int32.
    """
    d = present(cfg.dpo)
    scores = token_scores.log_probs(top, x, batch.labels, cfg)
    ratios = jnp.where(batch.labels == IGNORED, 0.0, scores - batch.reference)
    sums = psum(_by_segment(ratios, batch.segment_ids, 2 * max_pairs), SEQUENCE)
    chosen, rejected = dpo.rewards(sums.reshape(len(sums), max_pairs, 2), d.beta)
    here = jnp.arange(max_pairs) < psum(_starts_of_pairs(batch), SEQUENCE)[:, None]
    of_pairs = dpo.measures(chosen, rejected, d.label_smoothing)
    # Every rank of SEQUENCE knows all pairs of its rows: the first one counts them.
    counted = here & (lax.axis_index(SEQUENCE) == 0)
    totals = jnp.sum(jnp.where(counted, of_pairs, 0.0), axis=(1, 2))
    return totals[0], lax.stop_gradient(totals)


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
