"""Files in which a kernel describes a host's network and PCI devices, below a folder of a test."""

import ipaddress
from pathlib import Path


def write(path: Path, text: str | bytes) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())


def link(path: Path, to: Path) -> None:
    """Make a link, and what it leads to a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


def rdma(
    root: Path, card: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", **more: str
) -> None:
    """Add an RDMA card with a port. Args: more: driver (mlx5_core), rate, pci (its address)."""
    folder = root / "sys/class/infiniband" / card
    device = root / "sys/bus/pci/devices" / more.get("pci", f"0000:f0:{card}")
    link(folder / "device", device)
    if not (device / "driver").is_symlink():
        link(device / "driver", root / "sys/bus/pci/drivers" / more.get("driver", "mlx5_core"))
    rate = more.get("rate", "400 Gb/sec (4X NDR)")
    for name, text in {"state": state, "rate": rate, "link_layer": layer}.items():
        write(folder / "ports" / "1" / name, text)


def interface(root: Path, name: str, speed: int = 0, *, virtual: bool = False, up: str = "up"):
    """Add a network interface."""
    folder = root / "sys/class/net" / name
    write(folder / "operstate", up)
    write(folder / "speed", str(speed or -1))
    if not virtual:
        (folder / "device").mkdir()


def routes(root: Path, found: dict[str, str]) -> None:
    """Write the routing table: network -> interface, both for IPv4 and IPv6."""
    four = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"]
    six = []
    for text, name in found.items():
        network = ipaddress.ip_network(text)
        if network.version == 4:
            there, mask = (
                int(value).to_bytes(4, "little").hex().upper()
                for value in (network.network_address, network.netmask)
            )
            four.append(f"{name}\t{there}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0")
        else:
            there = f"{int(network.network_address):032x} {network.prefixlen:02x}"
            six.append(f"{there} {'0' * 32} 00 {'0' * 32} 00000400 1 0 00000001 {name:>8}")
    write(root / "proc/net/route", "\n".join(four))
    write(root / "proc/net/ipv6_route", "\n".join(six))
