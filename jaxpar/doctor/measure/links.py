"""How fast every pair of devices is, in one direction and in both at once.

Pairs that share no device are timed at the same time, each by its own two devices, so that n
devices take n - 1 rounds. A pair that falls behind is timed once more, alone. Where there are many
devices, pairs within a process come in such rounds, in all processes at once, and between processes
each device meets its counterpart in the next one.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh

from jaxpar.doctor.measure.bandwidth import DEVICES, KINDS, compile_repeated, numbers
from jaxpar.doctor.measure.timing import time_calls
from jaxpar.doctor.progress import Tell, no_report

type Pair = tuple[int, int]

#: Devices up to which every pair is timed.
ALL_PAIRS = 16

#: Bytes of a message, and calls in a program.
MESSAGE, MESSAGE_ON_CPU = 64 << 20, 1 << 16
CALLS, CALLS_ON_CPU = 10, 4

#: Share of the median bandwidth below which a pair is timed once more, and is slow if it stays.
SLOW = 0.8


@dataclass(frozen=True)
class Link:
    """Bytes/s between two devices, by their places in the mesh.

    there, back   in one direction, the other way being silent.
    both          in both directions together, each sending at the same time.
    """

    pair: Pair
    there: float
    back: float
    both: float

    @property
    def slowest(self) -> float:
        """Of the three, in one direction each."""
        return min(self.there, self.back, self.both / 2)


def rounds(devices: int, per_process: int) -> list[list[Pair]]:
    """Pairs, those of a round without a device in common.

    Args:     per_process: devices of each process, which are neighbors.
    """
    if devices <= ALL_PAIRS:
        return tournament(devices)
    found = []
    if per_process > 1:
        starts = range(0, devices, per_process)
        for pairs in tournament(per_process):
            found.append([(s + a, s + b) for s in starts for a, b in pairs])
    # Each process with the next one, in two rounds: the even ones first.
    for first in (0, 1):
        starts = range(first * per_process, devices - per_process, 2 * per_process)
        pairs = [(s + i, s + i + per_process) for s in starts for i in range(per_process)]
        found += [pairs] if pairs else []
    return found


def tournament(n: int) -> list[list[Pair]]:
    """Every pair of n once, in n - 1 rounds (n, if n is odd): the circle method."""
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
    """The links of each round.

    Args:     mesh: of one axis. message: bytes. gather: joins what every process has found.
              tell: gets each piece of work.
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
    """One pair, alone."""
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
    """Seconds of a call, by the place of each device in the mesh."""
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
    """Bytes/s in one direction that half of the links reach in each of the three ways."""
    return statistics.median(link.slowest for link in links) if links else math.nan


def behind(links: Sequence[Link]) -> list[Link]:
    """Those that are clearly slower than the median."""
    return [link for link in links if link.slowest < SLOW * median(links)]
