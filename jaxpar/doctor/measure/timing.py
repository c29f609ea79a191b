"""How long programs take that run on many devices, without their dispatch.

A program holds many calls of what is timed, and is launched several times back to back; the clock
stops once the devices are done. In a run of several processes each of them launches as often:
process 0 says how often.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.runtime.processes import peers

#: A batch of launches lasts about this long, far above the cost of waiting for its end.
BATCH_SECONDS = 0.02
MAX_LAUNCHES = 50

_agreements = itertools.count()


@dataclass(frozen=True)
class Spread:
    """Seconds of one call: median, fastest and slowest over the batches."""

    median: float
    fastest: float
    slowest: float

    @staticmethod
    def of(seconds: list[float]) -> "Spread":
        """Of the batches' times of a call."""
        return Spread(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Timed:
    """A call on all devices, and on each of this process's, by their ids."""

    whole: Spread
    devices: dict[int, Spread]


def agreed(text: str, patience: float) -> str:
    """What process 0 says. Every process calls it equally often, in the same order."""
    return peers.exchange(f"doctor/agreed/{next(_agreements)}", text, patience)[0]


def time_calls(
    program: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    calls: int,
    repeats: int,
    patience: float,
) -> Timed:
    """Time a program that takes what it returns, so that every launch waits for the one before.

    Args:     program: compiled; its argument may be donated. calls: of what is timed in it.
              repeats: batches. patience: seconds for the processes to agree.
    """
    x = jax.block_until_ready(program(x))
    began = time.perf_counter()
    x = jax.block_until_ready(program(x))
    once = max(time.perf_counter() - began, 1e-7)
    wanted = min(max(round(BATCH_SECONDS / once), 1), MAX_LAUNCHES)
    if jax.default_backend() == "cpu":
        wanted = 1  # of two collectives in flight, each may hold the threads that the other needs
    launches = int(agreed(str(wanted), patience))
    times: dict[int, list[float]] = {}
    whole = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(launches):
            x = program(x)
        ready = when_ready(x)
        for device, at in ready.items():
            times.setdefault(device, []).append((at - began) / (launches * calls))
        whole.append((max(ready.values()) - began) / (launches * calls))
    return Timed(Spread.of(whole), {d: Spread.of(each) for d, each in times.items()})


def when_ready(x: Any) -> dict[int, float]:
    """When each local device had its shard of an array, by `perf_counter`: a thread waits for each.

    Collectives aside, devices end independently, so the slow one is seen.
    """
    ready: dict[int, float] = {}

    def wait(shard: Any) -> None:
        shard.data.block_until_ready()
        ready[shard.device.id] = time.perf_counter()

    threads = [threading.Thread(target=wait, args=(shard,)) for shard in x.addressable_shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jax.block_until_ready(x)  # raises what a thread has met
    return ready
