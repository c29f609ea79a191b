"""Checks whether a process runs on CPUs near its GPUs."""

from jaxpar.runtime.gpus import pci
from jaxpar.runtime.gpus.numa import on_nodes
from jaxpar.tools.doctor.checks.findings import Finding, passed, skipped, warned
from jaxpar.tools.doctor.facts import HostFacts


def numa_binding(facts: HostFacts) -> Finding:
    """Check that a process runs only on CPUs near its GPUs."""
    check, numa = "NUMA binding", facts.numa
    if numa.nodes < 2 or not numa.own:
        return skipped(check, "one NUMA node" if numa.nodes < 2 else "no GPU that is known")
    nodes = {numa.node[gpu] for gpu in numa.own}
    known = tuple(sorted(node for node in nodes if node is not None))
    if None in nodes:
        return skipped(check, "the kernel does not know the NUMA nodes of the GPUs")
    near = set().union(*(pci.read_cpus(numa.near[gpu]) for gpu in numa.own))
    allowed = pci.read_cpus(numa.cpus)
    if allowed <= near:
        return passed(check, f"CPUs {numa.cpus}, near the GPUs on {on_nodes(known)}")
    said = f"on CPUs {numa.cpus}, but the GPUs are near CPUs {pci.write_cpus(near)}"
    remedy = "start with jaxpar.launch, which binds; or set JAXPAR_NUMA=auto, as with srun"
    if not allowed & near:
        remedy = "give the job CPUs of the GPUs' node: srun --gpu-bind=closest --cpu-bind=cores"
    return warned(check, f"{said} ({on_nodes(known)})", remedy)
