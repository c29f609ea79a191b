"""Binds a process to the NUMA node of its GPUs: CPUs, and memory where the kernel allows it.

A process whose threads run on another node than its GPU copies and launches through the link
between sockets. Where PCI devices are is read from the kernel's files below a root, which tests
replace. A device is named by its address, such as 0000:18:00.0.
"""

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from jaxpar.runtime.gpus import nvml, visible

ROOT = Path("/")


def gpus_on_pci(root: Path = ROOT) -> dict[str, str]:
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

    Args:     ids: indices or UUIDs. there: as from `gpus_on_pci`.
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


#: "auto" binds a process, "off" does not. `jaxpar.launch` sets it for its processes.
VARIABLE = "JAXPAR_NUMA"

#: Number of the system call set_mempolicy, by machine. Source: the kernel's tables of system calls.
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

#: Memory policies: prefer one node, or several (Linux 5.15). Source: linux/mempolicy.h.
MPOL_PREFERRED, MPOL_PREFERRED_MANY = 1, 5


@dataclass(frozen=True)
class NumaPlan:
    """Where a process should run.

    cpus   to run on; empty: it is not bound.
    nodes  of its GPUs.
    why    the reason if it is not bound. well   whether it needs not be.
    """

    cpus: frozenset[int] = frozenset()
    nodes: tuple[int, ...] = ()
    why: str = ""
    well: bool = False


def plan(gpus: list[str], allowed: set[int], root: Path = ROOT) -> NumaPlan:
    """Return the plan for a process.

    Args:     gpus: addresses of its GPUs. allowed: the CPUs that it may use now.
    """
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return NumaPlan(why="the host has one NUMA node", well=True)
    if not gpus:
        return NumaPlan(why="the addresses of its GPUs are not known")
    nodes = [numa_node(gpu, root) for gpu in gpus]
    known = tuple(sorted({node for node in nodes if node is not None}))
    if None in nodes:
        return NumaPlan(nodes=known, why="the kernel does not know the NUMA nodes of its GPUs")
    near = set().union(*(local_cpus(gpu, root) for gpu in gpus)) & allowed
    if not near:
        cpus = write_cpus(allowed)
        return NumaPlan(nodes=known, why=f"it may use only CPUs {cpus}, of other nodes")
    if near == allowed:
        why = f"all its CPUs are near its GPUs, on {on_nodes(known)}"
        return NumaPlan(nodes=known, why=why, well=True)
    return NumaPlan(frozenset(near), known)


def on_nodes(nodes: tuple[int, ...]) -> str:
    """Return "node 0" or "nodes 0 and 1"."""
    return f"node{'s' * (len(nodes) > 1)} {' and '.join(map(str, nodes))}"


def bind(planned: NumaPlan) -> bool:
    """Bind all threads of this process to the CPUs, and prefer memory of the nodes.

    Returns:  whether the memory policy is set, too. Docker's default profile forbids it.
    """
    for task in sorted(os.listdir("/proc/self/task")):
        try:
            os.sched_setaffinity(int(task), planned.cpus)
        except ProcessLookupError:
            continue  # the thread has ended
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mode = MPOL_PREFERRED if len(planned.nodes) == 1 else MPOL_PREFERRED_MANY
    bits = sum(1 << node for node in planned.nodes)
    words = [bits >> 64 * i & (1 << 64) - 1 for i in range(16)]
    mask = (ctypes.c_uint64 * 16)(*words)
    return ctypes.CDLL(None, use_errno=True).syscall(number, mode, mask, 64 * 16) == 0


def bind_process(
    env: Mapping[str, str] = os.environ,
    share: list[int] | None = None,
    root: Path = ROOT,
) -> list[str]:
    """Bind this process as JAXPAR_NUMA says, before JAX starts its threads.

    Args:     share: which of the visible GPUs are this process's; None: all. root: of the
              kernel's files.
    Returns:  what was done, for the log; nothing if there is nothing to bind.
    """
    if env.get(VARIABLE) != "auto" or not visible.gpu_is_present():
        return []
    ids = visible.visible_gpu_ids()
    gpus = addresses_of(ids if share is None else [ids[i] for i in share], gpus_on_pci(root))
    planned = plan(gpus, os.sched_getaffinity(0), root)
    if not planned.cpus:
        return [] if planned.well else [f"NUMA: not bound, since {planned.why}"]
    memory = bind(planned)
    text = f"CPUs {write_cpus(planned.cpus)} of {on_nodes(planned.nodes)}, near the GPUs"
    also = "memory there first" if memory else "not the memory: the kernel refused its policy"
    return [f"NUMA: {text}; {also}"]
