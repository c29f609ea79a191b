"""Runs and times the steps of a measurement, until they are done or a signal cuts them short."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.config import Config
from jaxpar.monitoring.routing import RecordedRouting
from jaxpar.parallel.context import order_of
from jaxpar.runtime import signals
from jaxpar.runtime.processes import peers
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.tools.bench.conditions import Watch
from jaxpar.tools.profiling.options import WARM_UP

#: Seconds between progress lines.
EVERY = 5.0


@dataclass
class TimedSteps:
    """The steps of a measurement.

    done         `Metrics` of each step that has been waited for.
    losses       Of each of them.
    times        When each of them was done.
    waits        Seconds that the host waited for each batch; that of a further step is the last.
    batch        The last one.
    cut_short    The signal that ended the measurement; empty if it is complete.
    """

    warm_up: int
    done: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    batch: Any = None
    cut_short: str = ""

    @property
    def begin(self) -> int:
        """The number of steps before the timed ones.

        If the warm-up was cut short, its own steps count, without the first ones.
        """
        return self.warm_up if len(self.times) > self.warm_up else WARM_UP

    @property
    def seconds(self) -> list[float]:
        """The seconds of each timed step; none if it was cut short before."""
        return [b - a for a, b in itertools.pairwise(self.times)][self.begin - 1 :]


def time_steps(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterator[Any],
    warm_up: int,
    steps: int,
    gpus: Watch,
    first_done: Callable[[], None],
) -> tuple[TimedSteps, Any]:
    """Run a step on consecutive batches, and one more than are timed.

    As in training, each step is waited for after the next one is dispatched. SIGTERM, SIGHUP or
    Ctrl-C ends the loop after the current step, in all processes alike; a second one ends the
    process.

    Args:     state: donated. warm_up, steps: numbers of steps. gpus: begins where timing does.
              first_done: called once the first step has been dispatched and compiled.
    Returns:  the steps, and the state after them.
    """
    found, pending, told = TimedSteps(warm_up), None, time.perf_counter()
    with signals.StopRequest(jax.process_count() > 1) as stop:
        for _ in range(warm_up + steps + 1):
            began = time.perf_counter()
            found.batch = batch = next(batches)
            found.waits.append(time.perf_counter() - began)
            state, measured = step(state, batch)
            if pending is None:  # the first step has been waited for
                first_done()
            else:
                found.losses.append(float(pending["loss"]))
                found.done.append(pending)
                found.times.append(time.perf_counter())
                told = progress(found.times, told, warm_up + steps)
            if len(found.times) in (WARM_UP, warm_up):
                gpus.begin()
            pending = measured
            if stop.due() and len(found.times) < warm_up + steps:
                found.cut_short = stop.received or "SIGTERM"
                break
    return found, state


def progress(times: Sequence[float], told: float, of: int) -> float:
    """Print a progress line every few seconds, and return the time of the last line.

    The next step is already dispatched, so the devices do not wait.
    """
    if times[-1] - told < EVERY or len(times) < 2:
        return told
    peers.log(f"step {len(times)} of {of}: {times[-1] - times[-2]:.3f} s")
    return times[-1]


def cut_short_card(found: TimedSteps, steps: int) -> dict[str, Any]:
    """Return the card's entry of a measurement that was cut short; empty of a complete one."""
    if not found.cut_short:
        return {}
    asked = {"warm_up_steps": found.warm_up, "steps": steps}
    return {"cut_short": {"by": found.cut_short, "asked": asked}}


def in_words(card: dict[str, Any]) -> str:
    """Format that entry as a line; empty without one."""
    if not (found := card.get("cut_short")):
        return ""
    asked = found["asked"]
    return (
        f"cut short by {found['by']}: {card['steps']} timed steps after {card['warm_up_steps']}, "
        f"of {asked['steps']} after {asked['warm_up_steps']}"
    )


# ---------------------------------------- Repeats a recorded routing in every step of a measurement


class RoutingReplay:
    """Adds a recorded routing to batches. It is copied to the devices once."""

    def __init__(self, routing: RecordedRouting, cfg: Config, mesh: Mesh):
        """
        Args:     cfg: resolved for the mesh; the routing fits it.
        """
        order, experts = order_of(cfg), routing.experts
        placed = experts if order is None else experts[:, order]
        sharding = NamedSharding(mesh, BATCH_SPEC)
        self._experts = jax.make_array_from_callback(placed.shape, sharding, placed.__getitem__)

    def of(self, batch: Batch) -> Batch:
        """Return a batch with the routing."""
        return dataclasses.replace(batch, experts=self._experts)

    def of_each(self, batches: Generator[tuple[int, Batch]]) -> Generator[tuple[int, Batch]]:
        """Yield each batch with the routing. Closes `batches` at the end."""
        with contextlib.closing(batches):
            for step, batch in batches:
                yield step, self.of(batch)
