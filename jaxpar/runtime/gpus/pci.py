"""Where PCI devices are in this host: their NUMA nodes, and the CPUs near them.

Read from the kernel's files below a root, which tests replace. A device is named by its address,
such as 0000:18:00.0.
"""

import contextlib
import re
from collections.abc import Sequence, Set
from pathlib import Path

from jaxpar.runtime.gpus import nvml

ROOT = Path("/")


def gpus(root: Path = ROOT) -> dict[str, str]:
    """Return the addresses of the NVIDIA GPUs that this process may use with their UUIDs, in order.

    Equal GPUs have this order in CUDA too. NVML leaves out the GPUs that a job's cgroup forbids, as
    CUDA does. Without it, all GPUs of the driver's files.
    """
    with contextlib.suppress(nvml.Unavailable):
        if found := nvml.addresses():
            return found
    found = {}
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        uuid = re.search(r"GPU UUID:\s*(\S+)", file.read_text("utf-8", "replace"))
        found[file.parent.name] = uuid[1] if uuid else ""
    return found


def addresses_of(ids: Sequence[str], there: dict[str, str]) -> list[str]:
    """Return the addresses of the GPUs in CUDA_VISIBLE_DEVICES; none if one of them is unknown.

    Args:     ids: indices or UUIDs. there: as from `gpus`.
    """
    found = []
    for name in ids:
        fitting = list(there)[int(name) : int(name) + 1] if name.isdigit() else []
        fitting += [a for a, uuid in there.items() if name.startswith("GPU-") and name in uuid]
        if len(fitting) != 1:
            return []
        found += fitting
    return found


def numa_node(address: str, root: Path = ROOT) -> int | None:
    """Return a device's NUMA node; None if the kernel does not know it."""
    try:
        node = int((_folder(address, root) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def local_cpus(address: str, root: Path = ROOT) -> set[int]:
    """Return the CPUs near a device."""
    try:
        return read_cpus((_folder(address, root) / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _folder(address: str, root: Path) -> Path:
    return root / "sys/bus/pci/devices" / address


def read_cpus(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def write_cpus(cpus: Set[int]) -> str:
    """{0, 1, 2, 3, 8} -> "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)
