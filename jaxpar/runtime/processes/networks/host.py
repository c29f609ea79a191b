"""Facts about a host's network: RDMA ports, interfaces, routes, and NCCL's plugins.

They are read from files of the kernel below a root, which tests replace.
"""

import ipaddress
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.runtime.processes.addresses import resolved

#: Folders in which the vendors install NCCL's plugins, by the network.
#: Sources: AWS, "Get started with EFA and NCCL"; the manifests of GoogleCloudPlatform's
#: container-engine-accelerators; Google Cloud, "NCCL/gIB".
PLUGIN_FOLDERS = {
    "efa": ("opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
            "opt/aws-ofi-nccl/lib", "opt/aws-ofi-nccl/install/lib"),
    "gib": ("usr/local/gib/lib64",),
    "tcpxo": ("var/lib/tcpxo/lib64", "usr/local/fastrak/lib64"),
    "tcpx": ("usr/local/tcpx/lib64", "var/lib/tcpx/lib64"),
}  # fmt: skip


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    physical   whether it is a device, and not a bridge, bond, tunnel or veth.
    speed      Mbit/s; 0 if the kernel does not know.
    """

    name: str
    physical: bool
    speed: int


@dataclass(frozen=True)
class HostNetwork:
    """What a host has to reach the others.

    ports        RDMA ports, as from `rdma_ports`.
    opens        whether programs may open RDMA cards: a container shows their ports without.
    interfaces   those that are up, without loopback, sorted by name.
    routed       names of the interfaces that have a route.
    control      the interface by which the coordinator is reached; "" if unknown.
    plugins      folder of NCCL's plugin, by network.
    loadable     names of those whose folder the dynamic loader searches.
    """

    ports: list[dict[str, str]] = field(default_factory=list)
    opens: bool = True
    interfaces: list[Interface] = field(default_factory=list)
    routed: list[str] = field(default_factory=list)
    control: str = ""
    plugins: dict[str, str] = field(default_factory=dict)
    loadable: list[str] = field(default_factory=list)

    def active(self, layer: str) -> list[dict[str, str]]:
        """Return the usable ports of a link layer, "InfiniBand" or "Ethernet", without EFA's."""
        return [p for p in self._usable if p["link_layer"] == layer and p["driver"] != "efa"]

    @property
    def efa(self) -> list[dict[str, str]]:
        """The usable ports of Elastic Fabric Adapters."""
        return [p for p in self._usable if p["driver"] == "efa"]

    @property
    def _usable(self) -> list[dict[str, str]]:
        return [p for p in self.ports if "ACTIVE" in p["state"]] if self.opens else []

    @property
    def carriers(self) -> list[str]:
        """The interfaces that can carry data over TCP: devices with a route, or `control` alone.

        In a container, or with a bond, `control` itself is no device.
        """
        names = [i.name for i in self.interfaces if i.physical and i.name in self.routed]
        return names if not self.control or self.control in names else [self.control]

    @property
    def data(self) -> list[str]:
        """The devices other than `control`: where GPUs have networks of their own."""
        return [i.name for i in self.interfaces if i.physical and i.name != self.control]


def read(coordinator: str, env: Mapping[str, str], root: Path = Path("/")) -> HostNetwork:
    """Read this host's facts.

    Args:     coordinator: name or address of process 0's host; "" for none. env: for
              LD_LIBRARY_PATH.
    """
    routes = list(_routes(root))
    plugins = dict(_plugins(root))
    searched = {folder.rstrip("/") for folder in _searched(env, root)}
    return HostNetwork(
        ports=rdma_ports(root / "sys/class/infiniband"),
        opens=any((root / "dev/infiniband").glob("uverbs*")),
        interfaces=list(_interfaces(root)),
        routed=sorted({name for _, name, _ in routes} - {"lo"}),
        control=interface_towards(resolved(coordinator) if coordinator else [], routes),
        plugins=plugins,
        loadable=[name for name, folder in plugins.items() if folder in searched],
    )


def rdma_ports(folder: Path) -> list[dict[str, str]]:
    """Return the ports of RDMA cards: card, port, driver, state, rate and link layer."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        card = port.parents[1]
        about = {"card": card.name, "port": port.name, "driver": _driver(card / "device")}
        about |= {name: _text(port / name) for name in ("state", "rate", "link_layer")}
        found.append(about)
    return found


def _driver(device: Path) -> str:
    link = device / "driver"
    return os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _interfaces(root: Path) -> Iterator[Interface]:
    for folder in sorted((root / "sys/class/net").glob("*")):
        # A veth has no state of its own: "unknown" counts as up.
        if folder.name == "lo" or _text(folder / "operstate") not in ("up", "unknown"):
            continue
        speed = _text(folder / "speed")
        known = int(speed) if speed.isdigit() else 0
        yield Interface(folder.name, (folder / "device").exists(), known)


type Route = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str, int]


def _routes(root: Path) -> Iterator[Route]:
    """Yield the routes of the main table: network, interface, metric."""
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) < 8:
            continue
        network, mask = (int.from_bytes(bytes.fromhex(words[i]), "little") for i in (1, 7))
        yield ipaddress.IPv4Network((network, mask.bit_count())), words[0], int(words[6])
    for line in _text(root / "proc/net/ipv6_route").splitlines():
        words = line.split()
        if len(words) < 10 or words[9] == "lo":
            continue
        v6 = ipaddress.IPv6Network((int(words[0], 16), int(words[1], 16)))
        if not v6.is_link_local and not v6.is_multicast:
            yield v6, words[9], int(words[5], 16)


def interface_towards(addresses: list[str], routes: list[Route]) -> str:
    """Return the interface of the longest prefix that contains an address.

    Without an address, or for one of loopback (process 0's own name), that of the default route.
    """
    places = [ipaddress.ip_address(address) for address in addresses]
    places = [p for p in places if not p.is_loopback] or [ipaddress.ip_address("0.0.0.0")]
    for place in places:
        fitting = [r for r in routes if r[0].version == place.version and place in r[0]]
        if fitting:
            return min(fitting, key=lambda route: (-route[0].prefixlen, route[2]))[1]
    return ""


def _plugins(root: Path) -> Iterator[tuple[str, str]]:
    for name, folders in PLUGIN_FOLDERS.items():
        for folder in folders:
            if any((root / folder).glob("libnccl-net*.so*")):
                yield name, f"/{folder}"
                break


def _searched(env: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield the folders of LD_LIBRARY_PATH and of the dynamic loader's configuration."""
    yield from filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        for line in _text(file).splitlines():
            yield line.partition("#")[0].strip()
