"""Times programs on devices, without the time to launch them.

A batch of launches is back to back, and the clock stops when the devices have finished. Programs in
one process are interleaved; those of many devices are timed on each, and all processes launch them
the same number of times, which process 0 decides.
"""

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jaxpar.runtime.processes import peers

#: Duration of a batch of launches: far longer than the wait for its end, and short enough that all
#: programs run at the same clocks and temperature.
BATCH_SECONDS = 0.03
#: Most launches in a batch of that duration.
MAX_LAUNCHES = 1000
#: Batches run before timing starts.
WARM_UP = 2


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
