"""Detects the network between a run's hosts, and sets the variables for it that are safe."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path

from jaxpar.config import ConfigError, flag
from jaxpar.runtime.gpus.visible import gpu_is_present
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.networks.host import HostNetwork, read
from jaxpar.runtime.processes.networks.variables import VARIABLES


@dataclasses.dataclass(frozen=True)
class NetworkChoice:
    """A network, and its variables on this host.

    why         what of the host says so.
    to_set      variables that jaxpar sets.
    kept        variables of the network that the user has set, with the user's values.
    suggested   the others: name, value, why, source.
    """

    network: str
    why: str
    to_set: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    suggested: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what the console says of it."""
        parts = [f"{self.network}: {self.why}"]
        for word, pairs in (("set", self.to_set), ("kept", self.kept)):
            if pairs:
                parts.append(f"{word} {' '.join(f'{k}={v}' for k, v in pairs.items())}")
        told = [f"network    {'; '.join(parts)}"]
        if self.suggested:
            others = " ".join(f"{name}={value}" for name, value, *_ in self.suggested)
            told.append(f"network    consider {others}; doctor says why")
        return told


#: What each detected network is known by: facts -> words, empty if it is not there. The plugins of
#: clouds come first: they serve cards that also look like others.
DETECTORS: dict[str, Callable[[HostNetwork], str]] = {
    "efa": lambda host: _ports(host.efa, "Elastic Fabric Adapter"),
    "gib": lambda host: _plugin(host, "gib") if host.active("Ethernet") else "",
    "tcpxo": lambda host: _plugin(host, "tcpxo"),
    "tcpx": lambda host: _plugin(host, "tcpx"),
    "ib": lambda host: _ports(host.active("InfiniBand"), "InfiniBand"),
    "roce": lambda host: _ports(host.active("Ethernet"), "RDMA over Ethernet"),
}


def _ports(ports: list[dict[str, str]], what: str) -> str:
    if not ports:
        return ""
    rates = " and ".join(sorted({port["rate"] for port in ports if port["rate"]}))
    many = f"{len(ports)} active port{'s' * (len(ports) > 1)}"
    return f"{many} of {what}" + (f", {rates}" if rates else "")


def _plugin(host: HostNetwork, name: str) -> str:
    return f"NCCL's plugin in {host.plugins[name]}" if name in host.plugins else ""


def detect(host: HostNetwork) -> tuple[str, str]:
    """Return the network of a host, and why."""
    for network, known_by in DETECTORS.items():
        if why := known_by(host):
            return network, why
    names = ", ".join(host.carriers) or "no interface that is up"
    if any("ACTIVE" in port["state"] for port in host.ports) and not host.opens:
        return "tcp", f"RDMA cards that cannot be opened, without /dev/infiniband; {names}"
    return "tcp", f"no RDMA port that is active and no plugin of NCCL; {names}"


def choose(asked: str, host: HostNetwork, env: Mapping[str, str]) -> NetworkChoice:
    """Return the network and its variables.

    Args:     asked: `cluster.network`, but "none". env: `os.environ`.
    Raises:   ConfigError if the host has no active port of the network that is asked for.
    """
    network, why = detect(host)
    if asked != "auto":
        network, why = asked, _asked(asked, host)
    rows = [row for row in VARIABLES[network] if row.where(host)]
    taken = env.keys() - {"LD_LIBRARY_PATH"}  # which is extended, not replaced
    kept = {row.name: env[row.name] for row in rows if row.name in taken}
    open_ = [(row, row.value.format(**_names(host, network))) for row in rows]
    open_ = [(row, value) for row, value in open_ if row.name not in kept]
    return NetworkChoice(
        network,
        why,
        {row.name: value for row, value in open_ if row.is_set},
        kept,
        [(row.name, value, row.why, row.source) for row, value in open_ if not row.is_set],
    )


def _asked(network: str, host: HostNetwork) -> str:
    """Return what the host has of a network that the user names."""
    why = DETECTORS[network](host) if network in DETECTORS else ""
    if not why and network in ("ib", "roce", "efa"):
        rule = f"has no active port on this host, which looks like {detect(host)[0]}"
        fix = f"check the cards with jaxpar doctor, or use {flag('cluster.network', 'auto')}"
        raise ConfigError("cluster.network", network, rule, fix)
    return ", ".join(filter(None, ["as cluster.network says", why]))


def _names(host: HostNetwork, network: str) -> dict[str, str]:
    """Return the names of this host for the table's values."""
    cards = lambda layer: ",".join(f"{p['card']}:{p['port']}" for p in host.active(layer))  # noqa: E731
    return {
        "control": host.control or "INTERFACE",
        "carriers": ",".join(host.carriers) or "INTERFACE",
        "data": ",".join(host.data) or "INTERFACES",
        "infiniband": cards("InfiniBand"),
        "ethernet": cards("Ethernet"),
        "plugin": host.plugins.get(network, "FOLDER_OF_THE_PLUGIN"),
    }


def settle(
    asked: str,
    coordinator: str,
    env: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> NetworkChoice:
    """Choose the network, and set its variables in `env`. NCCL reads them when it first connects.

    Raises:   ConfigError as `choose`.
    """
    found = choose(asked, read(coordinator, env, root), env)
    env.update(found.to_set)
    return found


def between_hosts(
    asked: str, coordinator: str, seconds: float, report: Callable[[str], None]
) -> list[str]:
    """Set the variables for the network between the hosts of connected processes, and report them.

    Nothing is set for processes of one host, or if "none" is asked for; under "auto", only where
    there are GPUs, since only NCCL reads the variables.

    Args:     asked: `cluster.network`. coordinator: process 0's host. seconds: to wait for the
              other processes.
    Returns:  what was set, each as "name=value".
    Raises:   ConfigError as `choose`; PeerFailed in the other processes.
    """
    if len(set(peers.hosts)) < 2:
        return []
    used = asked != "none" and (asked != "auto" or gpu_is_present())
    choice = peers.all_or_none(
        "network", seconds, lambda: settle(asked, coordinator) if used else None
    )
    networks = peers.exchange("networks", choice.network if choice else "", seconds)
    for line in (*(choice.lines() if choice else ()), *differing(networks, peers.hosts)):
        report(line)
    return [f"{name}={value}" for name, value in choice.to_set.items()] if choice else []


def differing(networks: list[str], hosts: list[str]) -> Iterator[str]:
    """Yield a warning if the hosts have not all chosen the same network.

    Args:     networks, hosts: of each process; a network of "" counts as none chosen.
    """
    where: dict[str, list[str]] = {}
    for network, host in dict.fromkeys(zip(networks, hosts, strict=True)):
        where.setdefault(network or "none", []).append(host)
    if len(where) > 1:
        told = " and ".join(f"{network} in {', '.join(names)}" for network, names in where.items())
        yield f"warning: the hosts have different networks, which may not connect: {told}"
