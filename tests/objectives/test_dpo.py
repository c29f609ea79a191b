"""The loss of a pair, against figures worked out by hand."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.objectives.pairs import MEASURES, dpo_loss, measures, rewards


def test_loss():
    assert dpo_loss(jnp.float32(0)) == pytest.approx(math.log(2))
    assert dpo_loss(jnp.float32(2)) == pytest.approx(math.log(1 + math.exp(-2)))
    smoothed = 0.9 * math.log(1 + math.exp(-2)) + 0.1 * math.log(1 + math.exp(2))
    assert dpo_loss(jnp.float32(2), 0.1) == pytest.approx(smoothed)
    assert jnp.isfinite(dpo_loss(jnp.float32(-1e4))) and dpo_loss(jnp.float32(1e4)) == 0


def test_the_gradient_pushes_apart_by_the_probability_of_the_wrong_order():
    """Equation 7's gradient: -beta sigmoid(-margin) for the chosen response."""
    of = lambda chosen: dpo_loss(rewards(jnp.array([chosen, 1.0]), 0.5)[0] - 0.5)  # noqa: E731
    assert jax.grad(of)(3.0) == pytest.approx(-0.5 / (1 + math.exp(1.0)))


def test_measures():
    chosen, rejected = rewards(jnp.array([[2.0, -1.0], [0.0, 4.0]]), 0.5)
    found = dict(zip(MEASURES, measures(chosen, rejected, 0.0), strict=True))
    assert found["reward_accuracy"].tolist() == [1, 0]
    assert found["reward_margin"].tolist() == [1.5, -2.0]
    assert found["chosen_reward"].tolist() == [1.0, 0.0]
    assert found["rejected_reward"].tolist() == [-0.5, 2.0]
