"""Times of programs that run beside each other in one process, taken in turns."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

#: A batch of launches lasts about this long: far above the cost of waiting for its end, and short
#: enough that all programs meet the same clocks and temperature.
BATCH_SECONDS = 0.03
#: In a batch of that length.
MAX_LAUNCHES = 1000
#: Batches run before the clock starts.
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch: over the repeats, each a batch of `launches`."""

    ms: float
    fastest: float
    slowest: float
    launches: int


@dataclasses.dataclass(frozen=True)
class Sustained:
    """Seconds of launches whose time is not taken, and of a batch after them.

    A GPU that computes without a pause comes to its power limit within some 0.1 s and lowers its
    clock; from then on a kernel takes as long as its energy does, as in a train step.
    """

    settle: float
    timed: float


def time_interleaved[Name: Hashable](
    programs: Mapping[Name, Callable[[], Any]], repeats: int, sustained: Sustained | None = None
) -> dict[Name, Timing | Exception]:
    """The time of each program; of one that fails, its error.

    Each repeat runs a batch of every program once, in turn, so that a drift of the clocks meets
    all of them alike. A batch is launched back to back and waited for at its end.

    Args:     sustained: how long each batch lasts, and what comes before it; None: BATCH_SECONDS,
              and nothing.
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
            ms = [1e3 * s for s in seconds]
            found[name] = Timing(statistics.median(ms), min(ms), max(ms), launches[name])
    return found


def _batch(program: Callable[[], Any], launches: int) -> float:
    """Seconds of a launch. Results are dropped as they come, so memory does not pile up."""
    began = time.perf_counter()
    for _ in range(launches):
        last = program()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / launches


def _launches(program: Callable[[], Any], batch: float) -> int:
    """How many launches fill so many seconds; the program is compiled and warm afterwards."""
    _batch(program, 1)
    once = _batch(program, 1)
    for _ in range(WARM_UP):
        n = min(max(round(BATCH_SECONDS / once), 1), MAX_LAUNCHES)
        once = _batch(program, n)
    most = MAX_LAUNCHES * max(batch / BATCH_SECONDS, 1)
    return min(max(round(batch / once), 1), round(most))
