"""Failures of a cluster: how often they come, what they take away, and a random stream of them.

The default rates are those of the pre-training of Llama 3 405B: 54 days on 16,384 H100s in hosts of
eight, with 466 interruptions, of which 47 were planned (Llama Team 2024, 2407.21783, section 3.3.4
and table 5). The 419 others are divided here by what a run loses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

HOUR, DAY = 3600.0, 86400.0

_HOST_HOURS = 54 * 24 * 16384 / 8
_GPU_HOURS = 54 * 24 * 16384


@dataclass(frozen=True)
class Rates:
    """Mean hours between failures, of each kind; infinite if it never happens."""

    gpu: float = _GPU_HOURS / 268
    """For each GPU. Its host leaves the run. 268: GPUs 148, HBM3 72, SRAM 19, system processor 17,
    silent data corruption 6, thermal interface and sensor 6."""
    host: float = _HOST_HOURS / 53
    """For each host, which leaves the run. 53: unplanned maintenance 32, network card 7, SSD 3,
    power supply 3, chassis 2, board 2, CPU 2, memory 2."""
    network: float = _HOST_HOURS / 42
    """For each host. All processes end, but no host is lost. 42: switches and cables 35, NCCL's
    watchdog 7."""
    software: float = _HOST_HOURS / 56
    """For each host. All processes end, but no host is lost. 56: bugs 54, other software 2."""
    planned: float = 54 * 24 / 47
    """For the run, which saves and stops in time."""


#: Failures that are drawn at once.
_AT_ONCE = 256

#: Kinds of failures that take a host away.
LOSES_HOST = ("gpu", "host")

KINDS = tuple(field.name for field in fields(Rates))


class Interruption(NamedTuple):
    """A failure: seconds since the start, its kind, and the place of the host in the run."""

    time: float
    kind: str
    host: int


def per_second(rates: Rates, hosts: int, gpus_per_host: int) -> dict[str, float]:
    """Return how many failures of each kind per second a run of `hosts` hosts has."""
    units = {"gpu": hosts * gpus_per_host, "planned": 1}
    return {kind: units.get(kind, hosts) / (getattr(rates, kind) * HOUR) for kind in KINDS}


def failures(rates: Rates, hosts: int, gpus_per_host: int, seed: int) -> Iterator[Interruption]:
    """Yield random failures in order, endlessly: those of a Poisson process for each kind.

    They depend on the seed and the arguments alone, so that policies can be compared under the same
    failures. A host that is away cannot fail: the simulation skips its failures.
    """
    rng = np.random.default_rng(seed)
    each = per_second(rates, hosts, gpus_per_host)
    total = sum(each.values())
    if not total:
        return
    shares = np.cumsum([each[kind] / total for kind in KINDS])
    now = 0.0
    while True:
        gaps = rng.exponential(1 / total, _AT_ONCE)
        kinds = np.searchsorted(shares, rng.random(_AT_ONCE), "right").clip(max=len(KINDS) - 1)
        places = rng.integers(hosts, size=_AT_ONCE)
        for gap, kind, host in zip(gaps.tolist(), kinds.tolist(), places.tolist(), strict=True):
            now += gap
            yield Interruption(now, KINDS[kind], host)
