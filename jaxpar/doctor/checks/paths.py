"""Checks of the ways between a host's GPUs, its CPUs and its network cards."""

from collections.abc import Callable, Sequence

from jaxpar.doctor.checks.findings import Finding, passed, skipped, warned
from jaxpar.doctor.facts import HostFacts
from jaxpar.runtime.gpus import pci
from jaxpar.runtime.gpus.numa import on_nodes


def numa_binding(facts: HostFacts) -> Finding:
    """Check that a process runs only on CPUs near its GPUs."""
    check, paths = "NUMA binding", facts.paths
    if paths.nodes < 2 or not paths.own:
        return skipped(check, "one NUMA node" if paths.nodes < 2 else "no GPU that is known")
    nodes = {paths.node[gpu] for gpu in paths.own}
    known = tuple(sorted(node for node in nodes if node is not None))
    if None in nodes:
        return skipped(check, "the kernel does not know the NUMA nodes of the GPUs")
    near = set().union(*(pci.read_cpus(paths.near[gpu]) for gpu in paths.own))
    allowed = pci.read_cpus(paths.cpus)
    if allowed <= near:
        return passed(check, f"CPUs {paths.cpus}, near the GPUs on {on_nodes(known)}")
    said = f"on CPUs {paths.cpus}, but the GPUs are near CPUs {pci.write_cpus(near)}"
    remedy = "start with jaxpar.launch, which binds; or set JAXPAR_NUMA=auto, as with srun"
    if not allowed & near:
        remedy = "give the job CPUs of the GPUs' node: srun --gpu-bind=closest --cpu-bind=cores"
    return warned(check, f"{said} ({on_nodes(known)})", remedy)


def gpudirect(facts: HostFacts) -> Finding:
    """Check that RDMA cards can read and write the memory of GPUs."""
    check, paths = "GPUDirect RDMA", facts.paths
    if not facts.infiniband or not facts.gpus:
        return skipped(check, "no RDMA card in this host" if facts.gpus else "no GPU")
    ways = [*paths.modules, *(["dma-buf"] if paths.dma_buf else [])]
    if ways:
        return passed(check, " and ".join(ways))
    said = "neither nvidia_peermem nor dma-buf: data goes through the host's memory"
    remedy = "modprobe nvidia_peermem; or the driver's open modules, with Linux 5.12 or newer"
    return warned(check, said, remedy)


def iommu(facts: HostFacts) -> Finding:
    """Check that the IOMMU does not translate what GPUs and cards exchange."""
    check, paths = "IOMMU", facts.paths
    if not facts.gpus:
        return skipped(check, "no GPU")
    if not paths.iommu:
        return passed(check, "off for GPUs and network cards")
    modes = sorted(set(paths.iommu.values()))
    if modes == ["identity"]:
        return passed(check, "passes through")
    said = f"{' and '.join(modes)}: GPUs and cards may exchange data only through the CPU"
    if paths.virtual:
        return skipped(check, f"{' and '.join(modes)}, in a virtual machine: its host decides")
    return warned(check, said, "start the kernel with iommu=pt, or turn the IOMMU off in the BIOS")


def acs(facts: HostFacts) -> Finding:
    """Check that PCIe switches do not redirect what GPUs and cards exchange to the CPU."""
    check, paths = "PCIe ACS", facts.paths
    if not facts.gpus or not paths.acs:
        return skipped(check, "no bridge above a GPU" if facts.gpus else "no GPU")
    if paths.virtual:
        return skipped(check, "a virtual machine needs it; its host decides")
    if None in paths.acs.values():
        return skipped(check, "only root can read it")
    redirects = {"ReqRedir", "CmpltRedir"}
    on = {bridge: bits for bridge, bits in paths.acs.items() if redirects & set(bits or ())}
    if not on:
        return passed(check, f"redirects nothing on {len(paths.acs)} bridges")
    some = ", ".join(list(on)[:3]) + (", ..." if len(on) > 3 else "")
    said = f"redirects to the CPU on {len(on)} of {len(paths.acs)} bridges: {some}"
    remedy = "setpci -s BRIDGE ECAP_ACS+0x6.w=0000, or turn ACS off in the BIOS"
    return warned(check, said, remedy)


def card_distance(facts: HostFacts) -> Finding:
    """Check that every GPU has a network card on its own node."""
    check, paths = "GPU and card", facts.paths
    if not facts.gpus or not paths.cards:
        return skipped(check, "no RDMA card in this host" if facts.gpus else "no GPU")
    nearest = {gpu: paths.nearest(gpu)[0] for gpu in paths.distances}
    if not nearest or not all(nearest.values()):
        return skipped(check, "the kernel does not show the ways between them")
    found = [way for way in pci.DISTANCES if way in nearest.values()]
    said = f"the nearest card of each GPU: {' or '.join(found)}"
    far = [gpu for gpu, way in nearest.items() if way == "SYS"]
    if far:
        told = f"{said}; {', '.join(far)} only through the other socket"
        return warned(check, told, "spread the cards over the sockets; check which are passed in")
    return passed(check, said)


def network(facts: HostFacts) -> Finding:
    """Check that NCCL finds the plugin or the library that the network to other hosts needs."""
    check, found = "network", facts.network
    if not facts.gpus:
        return skipped(check, f"no GPU; {found['network']}: {found['why']}")
    missing = [value for name, value, *_ in found["suggested"] if name == "LD_LIBRARY_PATH"]
    said = f"{found['network']}: {found['why']}"
    if missing:
        told = f"{said}; the dynamic loader does not find NCCL's plugin, so that it uses TCP"
        return warned(check, told, f"install it, and set LD_LIBRARY_PATH={missing[0]}")
    if found["network"] == "tcp" and "cannot be opened" in found["why"]:
        return warned(check, said, "docker run --device /dev/infiniband --ulimit memlock=-1")
    if found["network"] in ("ib", "roce") and not facts.paths.verbs:
        told = f"{said}; the dynamic loader does not find libibverbs.so.1, so that NCCL uses TCP"
        return warned(check, told, "apt install libibverbs1 ibverbs-providers")
    return passed(check, said)


PATHS: Sequence[Callable[[HostFacts], Finding]] = (
    network, gpudirect, card_distance, iommu, acs,
)  # fmt: skip


def check_paths(facts: HostFacts) -> list[Finding]:
    """Return the findings about a host's ways, from the facts of one of its processes."""
    return [one(facts) for one in PATHS]
