"""The loss of a pair, against figures worked out by hand."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.features.dpo import Dpo


def test_loss():
    dpo, smooth = Dpo(), Dpo(label_smoothing=0.1)
    assert dpo.loss(jnp.float32(0)) == pytest.approx(math.log(2))
    assert dpo.loss(jnp.float32(2)) == pytest.approx(math.log(1 + math.exp(-2)))
    smoothed = 0.9 * math.log(1 + math.exp(-2)) + 0.1 * math.log(1 + math.exp(2))
    assert smooth.loss(jnp.float32(2)) == pytest.approx(smoothed)
    assert jnp.isfinite(dpo.loss(jnp.float32(-1e4))) and dpo.loss(jnp.float32(1e4)) == 0


def test_the_gradient_pushes_apart_by_the_probability_of_the_wrong_order():
    """Equation 7's gradient: -beta sigmoid(-margin) for the chosen response."""
    dpo = Dpo(beta=0.5)
    of = lambda chosen: dpo.loss(dpo.rewards(jnp.array([chosen, 1.0]))[0] - 0.5)  # noqa: E731
    assert jax.grad(of)(3.0) == pytest.approx(-0.5 / (1 + math.exp(1.0)))


def test_measures():
    dpo = Dpo(beta=0.5)
    found = dpo.report(dpo.measures(*dpo.rewards(jnp.array([[2.0, -1.0], [0.0, 4.0]]))))
    assert found["reward_accuracy"].tolist() == [1, 0]
    assert found["reward_margin"].tolist() == [1.5, -2.0]
    assert found["chosen_reward"].tolist() == [1.0, 0.0]
    assert found["rejected_reward"].tolist() == [-0.5, 2.0]
