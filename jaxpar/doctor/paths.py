"""How a host's GPUs reach network cards, memory and CPUs, from the kernel's files.

GPUs and cards exchange data directly (GPUDirect RDMA) if a module lets them, and if neither an
IOMMU nor PCIe switches send what they exchange through the CPU.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.runtime.gpus import nvidia_smi, pci
from jaxpar.runtime.gpus.pci import DISTANCES, ROOT

#: Modules by which RDMA cards read and write memory of GPUs. Sources: NVIDIA, GPUDirect RDMA; AWS,
#: the EFA driver.
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")

#: Id of the extended capability ACS, and the bits of its control register by the names of `lspci`.
#: Source: PCI Express Base Specification, 7.7.8 Access Control Services.
ACS_ID = 0x000D
ACS_BITS = {"SrcValid": 0x01, "ReqRedir": 0x04, "CmpltRedir": 0x08, "EgressCtrl": 0x20}

#: Bytes of a device's configuration without extended capabilities: all that others than root read.
PLAIN_CONFIG = 256


@dataclass(frozen=True)
class PathFacts:
    """How GPUs and network cards are connected, by their PCI addresses.

    nodes       number of NUMA nodes. cpus   those that this process may use, as "0-3,8".
    own         this process's GPUs. near   the CPUs near each GPU. node   its NUMA node.
    cards       addresses of RDMA cards, by name.
    distances   for each GPU, that to each card, by name; one of `pci.DISTANCES`.
    modules     loaded modules of PEER_MODULES.
    dma_buf     whether the driver's open modules and the kernel share memory without them.
    iommu       how the IOMMU treats GPUs and cards: "identity" (passes through), "DMA", "DMA-FQ";
                without it, nothing.
    acs         set bits of ACS, by the bridge above a GPU or card; None if they cannot be read.
    virtual     whether this is a virtual machine.
    verbs       whether the dynamic loader finds libibverbs, by which NCCL uses InfiniBand and RoCE.
    """

    nodes: int = 1
    cpus: str = ""
    own: list[str] = field(default_factory=list)
    near: dict[str, str] = field(default_factory=dict)
    node: dict[str, int | None] = field(default_factory=dict)
    cards: dict[str, str] = field(default_factory=dict)
    distances: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    dma_buf: bool = False
    iommu: dict[str, str] = field(default_factory=dict)
    acs: dict[str, list[str] | None] = field(default_factory=dict)
    virtual: bool = False
    verbs: bool = True

    def nearest(self, gpu: str) -> tuple[str, list[str]]:
        """Return the shortest distance of a GPU to a card, and the cards there; "" if unknown."""
        ways = self.distances.get(gpu, {})
        best = min(ways.values(), key=DISTANCES.index, default="")
        return best, [card for card, way in ways.items() if way == best]


def read(
    ids: Sequence[str],
    ports: Sequence[Mapping[str, str]],
    root: Path = ROOT,
    ask: nvidia_smi.Run = nvidia_smi.run,
) -> PathFacts:
    """Read the facts.

    Args:     ids: this process's GPUs, as in CUDA_VISIBLE_DEVICES. ports: as from `rdma_ports`.
    """
    there = pci.gpus(root, ask)
    cards = dict(_cards({port["card"] for port in ports}, root))
    devices = [*there, *cards.values()]
    above = sorted({bridge for device in devices for bridge in pci.bridges(device, root)})
    return PathFacts(
        nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        cpus=pci.write_cpus(os.sched_getaffinity(0)),
        own=pci.addresses_of(ids, there),
        near={gpu: pci.write_cpus(pci.local_cpus(gpu, root)) for gpu in there},
        node={gpu: pci.numa_node(gpu, root) for gpu in there},
        cards=cards,
        distances={
            gpu: {
                name: way for name, card in cards.items() if (way := pci.distance(gpu, card, root))
            }
            for gpu in there
        },
        modules=[name for name in PEER_MODULES if (root / "sys/module" / name).is_dir()],
        dma_buf=_shares_dma_buf(root),
        iommu=dict(_iommu(devices, root)),
        acs={bridge: acs_of(_config(bridge, root)) for bridge in above},
        virtual="hypervisor" in _text(root / "proc/cpuinfo"),
        verbs=finds_verbs(),
    )


def finds_verbs() -> bool:
    """Return whether the dynamic loader finds the library that NCCL opens for RDMA."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def _distances(gpu: str, cards: Mapping[str, str], root: Path) -> dict[str, str]:
    ways = {name: pci.distance(gpu, card, root) for name, card in cards.items()}
    return {name: way for name, way in ways.items() if way}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _cards(names: set[str], root: Path) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        device = root / "sys/class/infiniband" / name / "device"
        if address := pci.address_of(Path(os.path.realpath(device)).name):
            yield name, address


def _shares_dma_buf(root: Path) -> bool:
    """Whether GPU memory is exported as dma-buf: by the open kernel modules, since Linux 5.12.

    Source: NVIDIA, GPU Operator, "GPUDirect RDMA and GPUDirect Storage".
    """
    release = _text(root / "proc/sys/kernel/osrelease") or platform.release()
    numbers = [int(word) for word in release.split("-")[0].split(".")[:2] if word.isdigit()]
    return "Open Kernel Module" in _text(root / "proc/driver/nvidia/version") and numbers >= [5, 12]


def _iommu(devices: Sequence[str], root: Path) -> Iterator[tuple[str, str]]:
    for device in devices:
        group = root / "sys/bus/pci/devices" / device / "iommu_group"
        if group.exists():
            yield device, _text(group / "type") or "unknown"


def _config(device: str, root: Path) -> bytes:
    try:
        return (root / "sys/bus/pci/devices" / device / "config").read_bytes()
    except OSError:
        return b""


def acs_of(config: bytes) -> list[str] | None:
    """Return the bits of ACS that are set in a device's configuration; None if it is cut short."""
    if len(config) <= PLAIN_CONFIG:
        return None
    place, seen = 0x100, set()
    while place and place not in seen and place + 8 <= len(config):
        seen.add(place)
        (header,) = struct.unpack_from("<I", config, place)
        if header & 0xFFFF == ACS_ID:
            (control,) = struct.unpack_from("<H", config, place + 6)
            return [name for name, bit in ACS_BITS.items() if control & bit]
        place = header >> 20
    return []
