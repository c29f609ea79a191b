"""Measures the bandwidth between pairs of devices, in one direction and in both at once.

Pairs without a common device are timed at the same time, each by its own two devices, so n devices
take n - 1 rounds. A slow pair is timed once more by itself. With many devices, all processes time
their own pairs in such rounds at the same time. Between processes, each device is paired with its
counterpart in the next process.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh

from jaxpar.runtime.timing import time_calls
from jaxpar.tools.doctor.measure import bandwidth
from jaxpar.tools.doctor.measure.bandwidth import (
    DEVICES,
    KINDS,
    SMALLEST,
    BandwidthRow,
    compile_repeated,
    numbers,
)
from jaxpar.tools.doctor.progress import Tell, no_report

type Pair = tuple[int, int]

#: Most devices for which every pair is timed.
ALL_PAIRS = 16

#: Bytes of a message, and calls in a program.
MESSAGE, MESSAGE_ON_CPU = 64 << 20, 1 << 16
CALLS, CALLS_ON_CPU = 10, 4

#: A pair below this share of the median bandwidth is timed once more, and reported if still slow.
SLOW = 0.8


@dataclass(frozen=True)
class Link:
    """The bandwidth in bytes/s between two devices, given by their positions in the mesh.

    there, back   one direction, while the other is idle.
    both          the sum of both directions, measured at the same time.
    """

    pair: Pair
    there: float
    back: float
    both: float

    @property
    def slowest(self) -> float:
        """The slowest of the three, per direction."""
        return min(self.there, self.back, self.both / 2)


def rounds(devices: int, per_process: int) -> list[list[Pair]]:
    """Return rounds of pairs; no two pairs of a round share a device.

    Args:     per_process: devices per process; those of a process are adjacent.
    """
    if devices <= ALL_PAIRS:
        return tournament(devices)
    found = []
    if per_process > 1:
        starts = range(0, devices, per_process)
        for pairs in tournament(per_process):
            found.append([(s + a, s + b) for s in starts for a, b in pairs])
    # Each process with the next one, in two rounds: first the even processes.
    for first in (0, 1):
        starts = range(first * per_process, devices - per_process, 2 * per_process)
        pairs = [(s + i, s + i + per_process) for s in starts for i in range(per_process)]
        found += [pairs] if pairs else []
    return found


def tournament(n: int) -> list[list[Pair]]:
    """Return every pair of n once, in n - 1 rounds (n if n is odd), by the circle method."""
    players = list(range(n + n % 2))
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        meet = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(p), max(p)) for p in meet if max(p) < n])
        players = [players[0], players[-1], *players[1:-1]]
    return [pairs for pairs in found if pairs]


def measure(
    mesh: Mesh,
    message: int,
    repeats: int,
    patience: float,
    gather: Callable[[dict[str, float]], dict[str, float]],
    tell: Tell = no_report,
) -> Iterator[Link]:
    """Time the links, round by round.

    Args:     mesh: one axis. message: bytes. gather: merges the results of all processes.
              tell: called with the pairs of each round.
    """
    per_process = len(jax.local_devices())
    for pairs in rounds(mesh.size, per_process):
        tell(", ".join(f"{a} - {b}" for a, b in pairs))
        yield from _round(mesh, pairs, message, repeats, patience, gather)


def again(
    mesh: Mesh,
    pair: Pair,
    message: int,
    repeats: int,
    patience: float,
    gather: Callable[[dict[str, float]], dict[str, float]],
) -> Link:
    """Time one pair by itself."""
    (link,) = _round(mesh, [pair], message, repeats, patience, gather)
    return link


def _round(mesh, pairs, message, repeats, patience, gather) -> Iterator[Link]:
    reverse = [(b, a) for a, b in pairs]
    ways = {"there": pairs, "back": reverse, "both": [*pairs, *reverse]}
    found = {
        name: _seconds(mesh, sends, message, repeats, patience, gather)
        for name, sends in ways.items()
    }
    for a, b in pairs:
        speeds = {
            name: message * (1 + (name == "both")) / max(seconds[a], seconds[b])
            for name, seconds in found.items()
        }
        yield Link((a, b), **speeds)


def _seconds(mesh, sends, message, repeats, patience, gather) -> dict[int, float]:
    """Return seconds per call, by each device's position in the mesh."""
    calls = CALLS if jax.default_backend() == "gpu" else CALLS_ON_CPU
    elements = message // 4
    send = lambda x: lax.ppermute(x, DEVICES, sends)  # noqa: E731
    program = compile_repeated(
        mesh, dataclasses.replace(KINDS["permute"], run=send), elements, calls
    )
    timed = time_calls(program, numbers(mesh, elements), calls, repeats, patience)
    place = {device.id: i for i, device in enumerate(mesh.devices.flat)}
    own = {str(place[d]): spread.median for d, spread in timed.devices.items()}
    return {int(i): seconds for i, seconds in gather(own).items()}


def median(links: Sequence[Link]) -> float:
    """Return the median over the links of `Link.slowest`."""
    return statistics.median(link.slowest for link in links) if links else math.nan


def behind(links: Sequence[Link]) -> list[Link]:
    """Return the links that are clearly slower than the median."""
    return [link for link in links if link.slowest < SLOW * median(links)]


# ------------------------- Measures the bandwidth of collectives within each host, and across hosts
#
# Across hosts, the first devices of all hosts are a group, the second ones another, and so on. All
# groups communicate at the same time, as in a train step: they share the hosts' network cards.


#: Collectives of training: those of FSDP and of the reduction over replicas; of experts.
MEASURED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")

WITHIN, ACROSS = "within hosts", "across hosts"


@dataclass(frozen=True)
class HostRow:
    """The timing of a collective. over   WITHIN or ACROSS."""

    over: str
    row: BandwidthRow


def by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[list[jax.Device]]:
    """Return the devices of each host. Args:     hosts: of each process."""
    found: dict[str, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(hosts[device.process_index], []).append(device)
    return list(found.values())


def equal(groups: Sequence[Sequence[jax.Device]]) -> bool:
    """Return whether there are several hosts with the same number of devices."""
    return len(groups) > 1 and len({len(group) for group in groups}) == 1


def measure_hosts(
    groups: Sequence[Sequence[jax.Device]],
    largest: int,
    repeats: int,
    patience: float,
    tell: Tell = no_report,
) -> Iterator[HostRow]:
    """Time the smallest and the largest message within hosts and across them.

    Args:     groups: the devices of each host, as many in each. The others: as in
              `bandwidth.measure`.
    """
    ways = {WITHIN: groups, ACROSS: [list(group) for group in zip(*groups, strict=True)]}
    for over, members in ways.items():
        if len(members[0]) < 2:
            continue
        mesh = bandwidth.in_groups(members)
        how = (largest, repeats, patience, lambda text, over=over: tell(f"{over}, {text}"))
        sizes = tuple(dict.fromkeys((SMALLEST, largest)))
        for row in bandwidth.measure(mesh, *how, MEASURED, sizes):
            yield HostRow(over, row)
