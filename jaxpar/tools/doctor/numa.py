"""Which NUMA nodes a host's GPUs are on, and which CPUs are near them, from the kernel's files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.runtime.gpus import pci


@dataclass(frozen=True)
class NumaFacts:
    """The NUMA nodes of a host; GPUs by their PCI addresses.

    nodes       number of NUMA nodes. cpus   those that this process may use, as "0-3,8".
    own         this process's GPUs. near   the CPUs near each GPU. node   its NUMA node.
    """

    nodes: int = 1
    cpus: str = ""
    own: list[str] = field(default_factory=list)
    near: dict[str, str] = field(default_factory=dict)
    node: dict[str, int | None] = field(default_factory=dict)


def read(ids: Sequence[str], root: Path = pci.ROOT) -> NumaFacts:
    """Read the facts.

    Args:     ids: this process's GPUs, as in CUDA_VISIBLE_DEVICES. root: of the kernel's files.
    """
    there = pci.gpus(root)
    return NumaFacts(
        nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        cpus=pci.write_cpus(os.sched_getaffinity(0)),
        own=pci.addresses_of(ids, there),
        near={gpu: pci.write_cpus(pci.local_cpus(gpu, root)) for gpu in there},
        node={gpu: pci.numa_node(gpu, root) for gpu in there},
    )
