"""Direct preference optimization: learn which of two responses to a prompt is preferred.

    r(y) = beta log(policy(y | prompt) / reference(y | prompt))          the implicit reward
    loss = -log sigmoid(r(chosen) - r(rejected))                        mean over pairs

With label smoothing e, the labels are taken to be wrong with probability e:

    loss = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)

Source:   Rafailov et al. 2023 (2305.18290), equation 7; smoothing: Mitchell 2023, "A note on DPO
          with noisy preferences".
"""

import jax
import jax.numpy as jnp


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
