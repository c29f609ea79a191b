"""Times the outer steps of DiLoCo, each fragment's on its own."""

import statistics
import time
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.diloco.sent import fragment_bytes
from jaxpar.step.state import TrainState

#: Timed outer steps of each fragment, after one that is not timed.
REPEATS = 5


def time_outer_steps(
    cfg: Config, mesh: Mesh, state: TrainState, repeats: int = REPEATS
) -> tuple[dict[str, Any], TrainState]:
    """Time the outer step of each fragment: its collectives over REPLICA, and the update.

    Nothing else runs meanwhile, as in training.

    Args:     state: donated.
    Returns:  the card's entry, empty without DiLoCo; and the state after these outer steps.
    """
    if not cfg.diloco.every:
        return {}, state
    outer, fragments = OuterSteps(cfg, mesh), []
    outer.compile(state)
    for i in range(cfg.diloco.fragments):
        seconds = []
        for _ in range(1 + repeats):
            jax.block_until_ready(state)
            began = time.perf_counter()
            state = jax.block_until_ready(outer.step(i, state))
            seconds.append(time.perf_counter() - began)
        fragments.append(_spread(seconds[1:]))
    found = {
        "every": cfg.diloco.every,
        "outer_step_seconds": sum(fragment["median"] for fragment in fragments),
        "fragments": fragments,
        "bytes_per_step": sum(fragment_bytes(cfg)) / cfg.diloco.every,
    }
    return {"outer_steps": found}, state


def mean_step_seconds(inner: float, card: dict[str, Any]) -> float:
    """Return the seconds of a step on average: an inner step, and its part of the outer steps.

    Args:     card: has the entry of `time_outer_steps`, if there are any.
    """
    found = card.get("outer_steps")
    return inner + found["outer_step_seconds"] / found["every"] if found else inner


def in_words(card: dict[str, Any]) -> str:
    """Format the entry as a line; empty without one."""
    found = card.get("outer_steps")
    if not found:
        return ""
    inner = card["step_seconds"]["median"]
    each, outer = found["fragments"], found["outer_step_seconds"]
    slowest = max(fragment["median"] for fragment in each)
    of = f" of {len(each)} fragments (at most {slowest * 1e3:.1f} at a time)"
    return (
        f"diloco: inner step {inner * 1e3:.1f} ms, outer steps{of if len(each) > 1 else ''} "
        f"{outer * 1e3:.1f} ms every {found['every']}, "
        f"mean {mean_step_seconds(inner, card) * 1e3:.1f} ms per step, "
        f"{found['bytes_per_step'] / 1e6:,.3g} MB per step over replica"
    )


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
    }
