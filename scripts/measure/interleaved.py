"""Times programs of one process in turns, without the time to launch them."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jaxpar.runtime.timing import Spread

#: Duration of a batch of launches: far longer than the wait for its end, and short enough that all
#: programs run at the same clocks and temperature.
BATCH_SECONDS = 0.03
#: Most launches in a batch of that duration.
MAX_LAUNCHES = 1000
#: Batches run before timing starts.
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds per launch over the repeats, each a batch of `launches`."""

    ms: float
    fastest: float
    slowest: float
    launches: int


@dataclasses.dataclass(frozen=True)
class Sustained:
    """Seconds of untimed launches, and of the timed batch after them.

    Under continuous load, a GPU reaches its power limit within about 0.1 s and lowers its clock.
    From then on, a kernel's time is limited by its energy, as in a train step.
    """

    settle: float
    timed: float


def time_interleaved[Name: Hashable](
    programs: Mapping[Name, Callable[[], Any]], repeats: int, sustained: Sustained | None = None
) -> dict[Name, Timing | Exception]:
    """Time each program; return its error if it fails.

    Each repeat runs one batch of every program, so that clock drift affects all of them equally.
    The launches of a batch are back to back, with one wait at the end.

    Args:     sustained: durations of warm-up and batch; None: no warm-up and BATCH_SECONDS.
    """
    batch = sustained.timed if sustained else BATCH_SECONDS
    found: dict[Name, Timing | Exception] = {}
    launches: dict[Name, int] = {}
    for name, program in programs.items():
        try:
            launches[name] = _launches(program, batch)
        except Exception as error:  # whatever a kernel or its compiler raises
            found[name] = error
    times: dict[Name, list[float]] = {name: [] for name in launches}
    for _ in range(repeats):
        for name, n in launches.items():
            if name in found:
                continue
            try:
                if sustained:
                    _batch(programs[name], max(round(n * sustained.settle / sustained.timed), 1))
                times[name].append(_batch(programs[name], n))
            except Exception as error:
                found[name] = error
    for name, seconds in times.items():
        if name not in found:
            of = Spread.of([1e3 * s for s in seconds])
            found[name] = Timing(of.median, of.fastest, of.slowest, launches[name])
    return found


def _batch(program: Callable[[], Any], launches: int) -> float:
    """Return the seconds per launch. Results are dropped at once to save memory."""
    began = time.perf_counter()
    for _ in range(launches):
        last = program()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / launches


def _launches(program: Callable[[], Any], batch: float) -> int:
    """Return how many launches fill `batch` seconds. Compiles and warms up the program."""
    _batch(program, 1)
    once = _batch(program, 1)
    for _ in range(WARM_UP):
        n = min(max(round(BATCH_SECONDS / once), 1), MAX_LAUNCHES)
        once = _batch(program, n)
    most = MAX_LAUNCHES * max(batch / BATCH_SECONDS, 1)
    return min(max(round(batch / once), 1), round(most))
