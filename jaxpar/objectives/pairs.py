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
from jaxpar.objectives import token_scores
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
    Returns:  (loss, [len(MEASURES)]: sums over pairs of `measures`), on the first rank of
              SEQUENCE; zeros on the others.
    Communication: that of `token_scores.log_probs`; all-reduces over SEQUENCE of [B, 2 max_pairs]
              float32 and [B] int32.
    """
    d = present(cfg.dpo)
    scores = token_scores.log_probs(top, x, batch.labels, cfg)
    ratios = jnp.where(batch.labels == IGNORED, 0.0, scores - batch.reference)
    sums = psum(_by_segment(ratios, batch.segment_ids, 2 * max_pairs), SEQUENCE)
    chosen, rejected = rewards(sums.reshape(len(sums), max_pairs, 2), d.beta)
    here = jnp.arange(max_pairs) < psum(_starts_of_pairs(batch), SEQUENCE)[:, None]
    of_pairs = measures(chosen, rejected, d.label_smoothing)
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


# ------------ Direct preference optimization: learn which of two responses to a prompt is preferred
#
#     r(y) = beta log(policy(y | prompt) / reference(y | prompt))          the implicit reward
#     loss = -log sigmoid(r(chosen) - r(rejected))                        mean over pairs
#
# With label smoothing e, the labels are taken to be wrong with probability e:
#
#     loss = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)
#
# Source:   Rafailov et al. 2023 (2305.18290), equation 7; smoothing: Mitchell 2023, "A note on DPO
#           with noisy preferences".


def dpo_loss(margin: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Compute the loss of each pair from its margin r(chosen) - r(rejected), float32."""
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def rewards(log_ratios: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """Return the rewards of the chosen and the rejected responses, float32 [...].

    Args:     log_ratios: [..., 2], log(policy / reference) of both responses, summed over tokens.
    """
    return beta * log_ratios[..., 0], beta * log_ratios[..., 1]


def measures(chosen: jax.Array, rejected: jax.Array, label_smoothing: float) -> jax.Array:
    """Return what is averaged over pairs, float32 [len(MEASURES), ...].

    Args:     chosen, rejected: rewards.
    """
    margin = chosen - rejected
    right = (margin > 0).astype(jnp.float32)
    loss = dpo_loss(margin, label_smoothing)
    return jnp.stack([loss, right, margin, chosen, rejected])


#: The rows of `measures`, as named in the metrics.
MEASURES = ("loss", "reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
