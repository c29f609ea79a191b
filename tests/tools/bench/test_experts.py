"""Experts on a card: how even the loads of the timed steps were, and what chose them."""

import jax.numpy as jnp
import pytest

from jaxpar.step.metrics import Metrics
from jaxpar.tools.bench import cards, conditions


def measured(**values: float) -> Metrics:
    every = {"loss": 1, "grad_norm": 1, "num_tokens": 1}
    return Metrics({k: jnp.float32(v) for k, v in (every | values).items()})


def steps(*more: dict[str, float]) -> list[Metrics]:
    """Steps on an expert axis, with these metrics beside the same entropy."""
    return [measured(expert_entropy=0.5, dropped_rows=0, **values) for values in more]


def test_a_model_without_experts_has_no_entry():
    assert conditions.of_steps([measured()]) == {}
    assert conditions.experts_in_words({}) == ""


def test_an_entry_has_the_spread_of_each_metric():
    ranks = {"fullest_rank": 1.5, "fullest_rank_mean": 1.2, "fullest_expert": 4}
    card = conditions.of_steps(steps(*({**ranks, "further_rounds": n} for n in (0, 2, 7))))
    assert card["experts"]["routing"] == "fresh router"
    assert card["experts"]["further_rounds"] == {"median": 2, "least": 0, "most": 7}
    assert card["experts"]["expert_entropy"]["median"] == 0.5
    said = conditions.experts_in_words(card)
    assert said == (
        "experts: fullest expert 4.00 times the mean, fullest rank 1.50 times "
        "(1.20 in the mean layer), 2 further rounds, dropped 0 per step; routing fresh router"
    )


@pytest.mark.parametrize(("before", "said"), [(3, "fresh router"), (200, "router after 200 steps")])
def test_an_entry_says_how_long_the_router_learned(before, said):
    card = conditions.of_steps(steps({"fullest_expert": 2}), None, before)
    assert card["experts"]["routing"] == said


@pytest.mark.parametrize("name", ["fullest_rank", "fullest_rank_mean", "further_rounds"])
def test_without_an_expert_axis_there_are_no_ranks(name):
    card = conditions.of_steps(steps({"fullest_expert": 2}))
    assert name not in card["experts"]
    assert "rank" not in conditions.experts_in_words(card)


def test_cards_are_compared_by_their_loads():
    one, two = (conditions.of_steps(steps({"fullest_expert": n})) for n in (2, 3))
    table, notes = cards.training_table(["a", "b"], [one, two])
    (row,) = [line.split() for line in table.splitlines() if "fullest expert" in line]
    assert row[2:] == ["2.00", "3.00", "1.500"] and not notes
