"""Binds a process to the NUMA node of its GPUs: CPUs, and memory where the kernel allows it.

A process whose threads run on another node than its GPU copies and launches through the link
between sockets.
"""

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxpar.runtime.gpus import pci, visible
from jaxpar.runtime.gpus.pci import ROOT

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
    nodes = [pci.numa_node(gpu, root) for gpu in gpus]
    known = tuple(sorted({node for node in nodes if node is not None}))
    if None in nodes:
        return NumaPlan(nodes=known, why="the kernel does not know the NUMA nodes of its GPUs")
    near = set().union(*(pci.local_cpus(gpu, root) for gpu in gpus)) & allowed
    if not near:
        cpus = pci.write_cpus(allowed)
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
    gpus = pci.addresses_of(ids if share is None else [ids[i] for i in share], pci.gpus(root))
    planned = plan(gpus, os.sched_getaffinity(0), root)
    if not planned.cpus:
        return [] if planned.well else [f"NUMA: not bound, since {planned.why}"]
    memory = bind(planned)
    text = f"CPUs {pci.write_cpus(planned.cpus)} of {on_nodes(planned.nodes)}, near the GPUs"
    also = "memory there first" if memory else "not the memory: the kernel refused its policy"
    return [f"NUMA: {text}; {also}"]
