"""The experts of a measurement: how even the loads of the timed steps were."""

import statistics
from collections.abc import Sequence
from typing import Any

import jax

from jaxpar.monitoring.routing import RecordedRouting

#: What chose each token's experts, if no recorded routing did: loads are never forced to be even.
FRESH = "fresh router"

#: With fewer steps before the timed ones, a router counts as fresh.
LEARNED = 20

#: Metrics of a step that a card has, if the step has them.
METRICS = (
    "expert_entropy",
    "fullest_expert",
    "fullest_rank",
    "fullest_rank_mean",
    "further_rounds",
    "dropped_rows",
)


def of_steps(
    measured: Sequence[Any], routing: RecordedRouting | None = None, steps_before: int = 0
) -> dict[str, Any]:
    """Return the card's entry for the experts; empty without experts.

    Args:     measured: `Metrics` of each timed step. routing: what they repeated.
              steps_before: number of steps in which the router learned.
    """
    there = [name for name in METRICS if name in measured[0]]
    if not there:
        return {}
    steps = jax.device_get([{name: m[name] for name in there} for m in measured])
    spread = {name: _spread([float(step[name]) for step in steps]) for name in there}
    chosen = FRESH if steps_before < LEARNED else f"router after {steps_before} steps"
    return {"experts": {"routing": str(routing or chosen)} | spread}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def in_words(card: dict[str, Any]) -> str:
    """Format the entry as a line; empty without one."""
    found = card.get("experts")
    if not found:
        return ""
    median = lambda name: found[name]["median"]  # noqa: E731
    parts = [f"fullest expert {median('fullest_expert'):.2f} times the mean"]
    if "fullest_rank" in found:
        mean = f"{median('fullest_rank_mean'):.2f} in the mean layer"
        parts.append(f"fullest rank {median('fullest_rank'):.2f} times ({mean})")
        parts.append(f"{median('further_rounds'):,.0f} further rounds")
    parts.append(f"dropped {found['dropped_rows']['most']:,.0f}")
    return f"experts: {', '.join(parts)} per step; routing {found['routing']}"
