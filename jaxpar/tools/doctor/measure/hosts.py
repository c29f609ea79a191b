"""Measures the bandwidth of collectives within each host, and across hosts.

Across hosts, the first devices of all hosts are a group, the second ones another, and so on. All
groups communicate at the same time, as in a train step: they share the hosts' network cards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from jaxpar.tools.doctor.measure import bandwidth
from jaxpar.tools.doctor.measure.bandwidth import SMALLEST, BandwidthRow
from jaxpar.tools.doctor.progress import Tell, no_report

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


def measure(
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
