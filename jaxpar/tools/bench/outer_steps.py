"""Times the outer steps of DiLoCo, each fragment's on its own."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.step.diloco.outer import OuterSteps
from jaxpar.step.diloco.overlap import programs_of_steps, same_program
from jaxpar.step.diloco.sent import fragment_bytes
from jaxpar.step.state import TrainState

#: Timed outer steps of each fragment, after one that is not timed.
REPEATS = 5

type Act = Callable[[TrainState], TrainState]


def time_outer_steps(
    cfg: Config,
    mesh: Mesh,
    state: TrainState,
    step_of: Callable[[int | None], Act],
    repeats: int = REPEATS,
) -> tuple[dict[str, Any], TrainState]:
    """Time the outer step of each fragment: its collectives over REPLICA, and the update.

    Without an overlap, nothing else runs meanwhile, as in training. With one, a fragment takes the
    time of its begin, of what each step with a part of its exchange takes more than one without,
    and of its update. All are waited for, one after another.

    Args:     state: donated. step_of: returns the train step on some batch, with a part of the
              exchange of a fragment; None: without. Only called with an overlap.
    Returns:  the card's entry, empty without DiLoCo; and the state after these outer steps.
    """
    d, fragments = cfg.diloco, list[dict[str, Any]]()
    if d is None:
        return {}, state
    outer = OuterSteps(cfg, mesh)
    outer.compile(state)
    if d.overlap:
        steps, state = _timed({f: step_of(f) for f in programs_of_steps(cfg)}, state, repeats)
    for i in range(d.fragments):
        acts = {"begin": outer.begin, "apply": outer.apply} if d.overlap else {"": outer.step}
        taken: dict[str, Act] = {name: functools.partial(act, i) for name, act in acts.items()}
        times, state = _timed(taken, state, repeats)
        if not d.overlap:
            fragments.append(times[""])
            continue
        more = steps[same_program(cfg, i)]["median"] - steps[None]["median"]
        whole = sum(spread["median"] for spread in times.values()) + d.overlap * more
        fragments.append({"median": whole, **times, "more_in_a_step": more})
    found = {
        "every": d.every,
        "overlap": d.overlap,
        "outer_step_seconds": sum(fragment["median"] for fragment in fragments),
        "fragments": fragments,
        "bytes_per_step": sum(fragment_bytes(cfg)) / d.every,
    }
    return {"outer_steps": found}, state


def _timed[Name](
    acts: dict[Name, Act], state: TrainState, repeats: int
) -> tuple[dict[Name, dict[str, float]], TrainState]:
    """Time some programs in turn, so that clocks affect all of them equally."""
    seconds: dict[Name, list[float]] = {name: [] for name in acts}
    for _ in range(1 + repeats):
        for name, act in acts.items():
            jax.block_until_ready(state)
            began = time.perf_counter()
            state = jax.block_until_ready(act(state))
            seconds[name].append(time.perf_counter() - began)
    return {name: _spread(each[1:]) for name, each in seconds.items()}, state


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
    beside = f", beside {found['overlap']} inner steps" if found["overlap"] else ""
    return (
        f"diloco: inner step {inner * 1e3:.1f} ms, outer steps{of if len(each) > 1 else ''} "
        f"{outer * 1e3:.1f} ms every {found['every']}{beside}, "
        f"mean {mean_step_seconds(inner, card) * 1e3:.1f} ms per step, "
        f"{found['bytes_per_step'] / 1e6:,.3g} MB per step over replica"
    )


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
    }
