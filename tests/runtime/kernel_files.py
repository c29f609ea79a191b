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
    device = root / "sys/bus/pci/devices" / more.get("pci", card)
    link(folder / "device", device.resolve())
    link(device / "driver", root / "sys/bus/pci/drivers" / more.get("driver", "mlx5_core"))
    write(root / "dev/infiniband" / f"uverbs_{card}", "")
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


def device(root: Path, way: str, node: int, cpus: str, config: bytes = b"") -> Path:
    """Add a PCI device, and the bridges above it. Returns:  its folder.

    Args:     way: "pci0000:17/0000:17:01.0/0000:18:00.0".
    """
    folder = root / "sys/devices"
    for step in way.split("/"):
        folder = folder / step
        if not step.startswith("pci") and not (root / "sys/bus/pci/devices" / step).exists():
            link(root / "sys/bus/pci/devices" / step, folder)
            write(folder / "class", "0x060400")
    write(folder / "class", "0x030200")
    write(folder / "numa_node", str(node))
    write(folder / "local_cpulist", cpus)
    write(folder / "config", config)
    return folder


def gpu(root: Path, way: str, node: int, cpus: str, config: bytes = b"") -> Path:
    """Add a GPU that the driver knows. Returns:  its folder."""
    address = way.split("/")[-1]
    text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{address[5:7]}aa\nBus Location: \t {address}"
    write(root / "proc/driver/nvidia/gpus" / address / "information", text)
    return device(root, way, node, cpus, config)


#: Two sockets, each with a switch of two GPUs and a card: PCI ways, nodes, CPUs.
SWITCH = "pci0000:{0}/0000:{0}:01.0/0000:{1}:00.0/0000:{2}:0{3}.0/0000:{4}:00.0"
GPUS = [
    (SWITCH.format("17", "18", "19", 0, "1a"), 0),
    (SWITCH.format("17", "18", "19", 1, "1b"), 0),
    (SWITCH.format("97", "98", "99", 0, "9a"), 1),
    (SWITCH.format("97", "98", "99", 1, "9b"), 1),
]
CARDS = [SWITCH.format("17", "18", "19", 2, "1c"), SWITCH.format("97", "98", "99", 2, "9c")]
CPUS = ["0-3", "4-7"]


def two_sockets(root: Path) -> None:
    """Write a host with four GPUs on two sockets."""
    for node in 0, 1:
        write(root / f"sys/devices/system/node/node{node}/cpulist", CPUS[node])
    for way, node in GPUS:
        gpu(root, way, node, CPUS[node])
    for node, way in enumerate(CARDS):
        device(root, way, node, CPUS[node])
        rdma(root, f"mlx5_{node}", pci=way.split("/")[-1])
