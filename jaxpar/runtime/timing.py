"""Times programs on devices, without the time to launch them.

A batch of launches is back to back, and the clock stops when the devices have finished. Programs of
many devices are timed on each, and all processes launch them the same number of times, which
process 0 decides.
"""

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.runtime.processes import peers

#: Duration of a batch of a program on many devices, and most launches in it.
BATCH_OF_DEVICES_SECONDS = 0.02
MAX_LAUNCHES_OF_DEVICES = 50

_agreements = itertools.count()


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds per call: median, fastest and slowest over the batches."""

    median: float
    fastest: float
    slowest: float

    @staticmethod
    def of(seconds: list[float]) -> "Spread":
        """Return the spread of the batches' times."""
        return Spread(statistics.median(seconds), min(seconds), max(seconds))


@dataclasses.dataclass(frozen=True)
class Timed:
    """The time of a call on all devices, and on each local device by its id."""

    whole: Spread
    devices: dict[int, Spread]


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
    wanted = min(max(round(BATCH_OF_DEVICES_SECONDS / once), 1), MAX_LAUNCHES_OF_DEVICES)
    if jax.default_backend() == "cpu":
        wanted = 1  # two collectives in flight could each hold the threads that the other needs
    # All processes time the same programs in the same order.
    topic = f"timing/launches/{next(_agreements)}"
    launches = int(peers.exchange(topic, str(wanted), patience)[0])

    def launch() -> jax.Array:
        nonlocal x
        for _ in range(launches):
            x = program(x)
        return x

    return time_batches(launch, repeats, launches * calls)


def time_batches(launch: Callable[[], jax.Array], repeats: int, calls: int = 1) -> Timed:
    """Time batches, each launched by a function that returns its last result.

    Args:     calls: timed calls in a batch.
    """
    whole: list[float] = []
    times: dict[int, list[float]] = {}
    for _ in range(repeats):
        began = time.perf_counter()
        ready = when_ready(launch())
        for device, at in ready.items():
            times.setdefault(device, []).append((at - began) / calls)
        whole.append((max(ready.values()) - began) / calls)
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


def time_work(work: Callable[[], Any], repeats: int) -> Spread:
    """Time work that waits for its own end, without the first call."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return Spread.of(times[1:])
