"""Times programs on many devices, without dispatch.

A program contains many calls of the timed operation and is launched several times back to back. The
clock stops when the devices have finished. All processes launch it the same number of times, which
process 0 decides.
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
    """Seconds per call: median, fastest and slowest over the batches."""

    median: float
    fastest: float
    slowest: float

    @staticmethod
    def of(seconds: list[float]) -> "Spread":
        """Return the spread of the batches' times."""
        return Spread(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Timed:
    """The time of a call on all devices, and on each local device by its id."""

    whole: Spread
    devices: dict[int, Spread]


def agreed(text: str, patience: float) -> str:
    """Return process 0's text. All processes must call this in the same order."""
    return peers.exchange(f"doctor/agreed/{next(_agreements)}", text, patience)[0]


def time_calls(
    program: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    calls: int,
    repeats: int,
    patience: float,
) -> Timed:
    """Time a program that takes its own result, so that each launch waits for the previous one.

    Args:     program: compiled; its argument may be donated. calls: timed calls in the program.
              repeats: batches. patience: seconds to wait for the other processes.
    """
    x = jax.block_until_ready(program(x))
    began = time.perf_counter()
    x = jax.block_until_ready(program(x))
    once = max(time.perf_counter() - began, 1e-7)
    wanted = min(max(round(BATCH_SECONDS / once), 1), MAX_LAUNCHES)
    if jax.default_backend() == "cpu":
        wanted = 1  # two collectives in flight could each hold the threads that the other needs
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
    """Return when each local device had finished its shard of an array, by `perf_counter`.

    One thread waits for each device. Without collectives the devices finish independently, so this
    shows which one is slow.
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
    jax.block_until_ready(x)  # raises the errors of the threads
    return ready
