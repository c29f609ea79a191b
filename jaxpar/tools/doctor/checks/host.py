"""Checks of versions, environment and host, and whether all processes agree on them."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxpar.config import Config
from jaxpar.execution import xla_flag_table
from jaxpar.runtime.gpus import xla_flags
from jaxpar.runtime.gpus.numa import on_nodes, read_cpus, write_cpus
from jaxpar.tools.doctor.checks.findings import Finding, Status, failed, passed, skipped, warned
from jaxpar.tools.doctor.facts import HostFacts

# -------------------- A table of environment variables that make a run slow, wrong or hard to debug


@dataclass(frozen=True)
class Variable:
    """A variable: its harmful values, the severity, the reason and the remedy."""

    name: str
    hurts: Callable[[str], bool]
    status: Status
    why: str
    remedy: str


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _unset(name: str) -> str:
    return f"unset {name}"


#: NCCL's are from its documentation of environment variables (2.28), XLA's and JAX's from theirs.
VARIABLES = (
    Variable("NCCL_P2P_DISABLE", _on, "fail", "GPUs cannot access each other directly: "
             "NVLink is not used", _unset("NCCL_P2P_DISABLE")),
    Variable("NCCL_P2P_LEVEL", _is("loc", "0"), "fail", "it disables direct access between GPUs",
             _unset("NCCL_P2P_LEVEL")),
    Variable("NCCL_SHM_DISABLE", _on, "warn", "processes of a host use the network if their "
             "GPUs have no peer access", _unset("NCCL_SHM_DISABLE")),
    Variable("NCCL_IB_DISABLE", _on, "warn", "hosts use TCP sockets instead of InfiniBand "
             "or RoCE", _unset("NCCL_IB_DISABLE")),
    Variable("NCCL_NET_GDR_LEVEL", _is("loc", "0"), "warn", "network cards cannot access the "
             "GPUs' memory directly", _unset("NCCL_NET_GDR_LEVEL")),
    Variable("NCCL_NVLS_ENABLE", lambda value: value.strip() != "0", "warn", "NVLink multicast is "
             "on: on shared hosts it can take the GPUs out of service; jaxpar keeps it off",
             "set it to 0, or unset it: jaxpar sets 0"),
    Variable("NCCL_DEBUG", _is("info", "trace"), "warn", "NCCL writes a log for every process",
             "set it to WARN"),
    Variable("NCCL_ALGO", bool, "warn", "it forces one algorithm for all sizes and collectives",
             _unset("NCCL_ALGO")),
    Variable("NCCL_PROTO", bool, "warn", "it forces one protocol for all sizes: LL halves "
             "the bandwidth, and LL128 is unsafe on some hosts", _unset("NCCL_PROTO")),
    Variable("NCCL_MAX_NCHANNELS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "too few channels to saturate NVLink", _unset("NCCL_MAX_NCHANNELS")),
    Variable("NCCL_MAX_CTAS", lambda v: v.isdigit() and int(v) < 8, "warn",
             "too few thread blocks to saturate NVLink", _unset("NCCL_MAX_CTAS")),
    Variable("CUDA_LAUNCH_BLOCKING", _on, "warn", "the host waits for every kernel",
             _unset("CUDA_LAUNCH_BLOCKING")),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), "warn", "all streams share one hardware "
             "queue, so less work overlaps", _unset("CUDA_DEVICE_MAX_CONNECTIONS")),
    Variable("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), "warn", "the driver allocates every "
             "array and waits for the device", _unset("XLA_PYTHON_CLIENT_ALLOCATOR")),
    Variable("XLA_PYTHON_CLIENT_PREALLOCATE", _is("false", "0"), "warn", "memory is allocated on "
             "demand: it fragments, and allocations fail later",
             _unset("XLA_PYTHON_CLIENT_PREALLOCATE")),
    Variable("JAX_ENABLE_X64", _on, "warn", "arrays without an explicit dtype have 64 bits",
             _unset("JAX_ENABLE_X64")),
    Variable("JAX_DISABLE_JIT", _on, "fail", "nothing is compiled", _unset("JAX_DISABLE_JIT")),
    Variable("JAX_DEBUG_NANS", _on, "warn", "every result is checked for NaN, and steps run twice",
             _unset("JAX_DEBUG_NANS")),
)  # fmt: skip

#: XLA flags that slow down every model: name, values, reason.
SLOW_FLAGS = (
    ("xla_dump_to", r".+", "XLA writes every program to disk"),
    ("xla_gpu_autotune_level", r"0", "matmuls are not tuned"),
    (
        "xla_gpu_deterministic_ops",
        r"true|1",
        "kernels are slower, in exchange for bitwise reproducibility",
    ),
    ("xla_backend_optimization_level", r"0", "XLA does not optimize"),
    ("xla_gpu_enable_command_buffer", r"", "every kernel is launched separately"),
)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each variable with a harmful value."""
    return [
        Finding(row.name, row.status, f"{row.name}={environment[row.name]}: {row.why}", row.remedy)
        for row in VARIABLES
        if row.name in environment and row.hurts(environment[row.name])
    ]


def flags_of(text: str) -> dict[str, str]:
    """Parse XLA_FLAGS into names and values; a flag without a value is "true"."""
    pairs = re.findall(r"--(\w+)(?:=(\S*))?", text)
    return {name: value if value or f"--{name}=" in text else "true" for name, value in pairs}


def matches(pattern: str, value: str) -> bool:
    """Return whether a flag's value matches a pattern of SLOW_FLAGS."""
    return re.fullmatch(pattern, value) is not None


#: Oldest driver for each major version of CUDA.
#: Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
OLDEST_DRIVER = {"12": 525, "13": 580}

#: Bytes of /dev/shm below which NCCL's and data loaders' shared memory may not fit; a container
#: has 64 MiB by default.
MIN_SHM_BYTES = 1 << 30

#: Fewest files that a process should be allowed to open.
MIN_OPEN_FILES = 1024

#: Most seconds between the clocks of two hosts. Beyond it, their logs cannot be put in order.
CLOCK_SKEW = 1.0

#: Packages that must have the same version in every process. Otherwise their compiled programs
#: may differ and deadlock.
SAME_CODE = ("jaxpar", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton")


def driver(facts: HostFacts) -> Finding:
    """Check that the driver is new enough for the CUDA version of JAX's plugin."""
    check, version = "driver", facts.versions.get("driver", "")
    major = next((m for m in OLDEST_DRIVER if _plugin(facts, m) != "-"), None)
    if not facts.gpus or major is None:
        return skipped(check, "no GPU" if not facts.gpus else "JAX is installed without CUDA")
    needed, found = OLDEST_DRIVER[major], version.partition(".")[0]
    said = f"{version}; CUDA {major} needs {needed} or newer"
    if found.isdigit() and int(found) < needed:
        return failed(check, said, "update the driver, or install jax[cuda12], which needs 525")
    return passed(check, said)


def plugin(facts: HostFacts) -> Finding:
    """Check the CUDA plugin. If its version is not jaxlib's, JAX falls back to the CPU."""
    check, lib = "CUDA plugin", facts.versions.get("jaxlib", "-")
    found = {m: v for m in OLDEST_DRIVER if (v := _plugin(facts, m)) != "-"}
    if not found:
        return skipped(check, "JAX is installed without CUDA")
    said = ", ".join(f"jax-cuda{m}-plugin {v}" for m, v in found.items()) + f", jaxlib {lib}"
    if len(found) > 1 or lib not in found.values():
        return failed(
            check, said, "install one plugin of jaxlib's version: pip install 'jax[cuda13]'"
        )
    return passed(check, said)


def _plugin(facts: HostFacts, major: str) -> str:
    return facts.versions.get(f"jax-cuda{major}-plugin", "-")


def backend(facts: HostFacts) -> Finding:
    """Check that JAX uses the host's GPUs, and has some if it is installed with CUDA."""
    check = "devices"
    if facts.backend_error:
        remedy = "fix this error; set JAX_PLATFORMS=cpu to see the rest of the report"
        return failed(check, f"JAX does not start: {facts.backend_error}", remedy)
    many = f"{len(facts.devices)} x {facts.devices[0]}" if facts.devices else "none"
    if facts.simulated:
        return passed(check, f"{len(facts.devices)} simulated CPU devices, as asked")
    there = len(facts.gpus) or facts.host["gpu_files"]
    with_cuda = any(_plugin(facts, major) != "-" for major in OLDEST_DRIVER)
    asked = "cpu" in facts.environment.get("JAX_PLATFORMS", "")
    if there and facts.backend != "gpu":
        remedy = "pip install 'jax[cuda13]'"
        if with_cuda:
            remedy = "read JAX's startup messages, and the driver and plugin checks"
        if asked:
            remedy = "unset JAX_PLATFORMS"
        return failed(check, f"JAX uses the CPU, but there are {there} GPUs", remedy)
    if with_cuda and facts.backend == "cpu" and not asked:
        said = f"{many}: JAX is installed with CUDA, but there is no GPU here"
        remedy = "load NVIDIA's driver; start a container with its GPUs, docker run --gpus all; "
        return warned(check, said, f"{remedy}if the CPU is meant, set JAX_PLATFORMS=cpu")
    return passed(check, f"{many} ({facts.backend})")


def libraries(facts: HostFacts) -> Finding:
    """Check LD_LIBRARY_PATH for CUDA libraries that take precedence over JAX's own."""
    check, folders = "LD_LIBRARY_PATH", facts.host["cuda_in_path"]
    if not folders:
        return passed(check, "no CUDA in it")
    if not any(name.startswith("nvidia-") for name in facts.versions):
        return passed(check, f"CUDA is the host's own, in {':'.join(folders)}")
    remedy = "unset it, unless you want to use that CUDA"
    said = f"CUDA in {':'.join(folders)} takes precedence over this environment's packages"
    return warned(check, said, remedy)


def flags(facts: HostFacts) -> list[Finding]:
    """Check XLA_FLAGS against the values measured on this GPU, and against flags known as slow."""
    given = flags_of(facts.environment.get("XLA_FLAGS", ""))
    gpu = facts.gpus[0].name if facts.gpus else ""
    rows = xla_flags.matching_rows(gpu, facts.versions.get("jax", ""), Config())
    found = []
    for row in rows:
        if row.name == xla_flag_table.TABLE:
            continue  # another autotuning table may have been measured on this machine
        if row.name in given and given[row.name] != row.value:
            said = f"--{row.name}={given[row.name]}; the measured value is {row.value}: {row.gain}"
            found.append(warned("XLA_FLAGS", said, f"remove --{row.name}"))
    for name, pattern, why in SLOW_FLAGS:
        if name in given and matches(pattern, given[name]):
            found.append(warned("XLA_FLAGS", f"--{name}={given[name]}: {why}", "remove the flag"))
    return found


def environment(facts: HostFacts) -> list[Finding]:
    """Check environment variables and XLA flags."""
    found = [*check(facts.environment), *flags(facts)]
    return found or [passed("environment", "no harmful settings")]


def shared_memory(facts: HostFacts) -> Finding:
    """Check the size of /dev/shm, through which the processes of a host communicate."""
    check, size = "/dev/shm", facts.host["shm"]
    if size is None:
        return skipped(check, "not found")
    if size < MIN_SHM_BYTES:
        remedy = "increase it: docker run --shm-size=16g; in Kubernetes, a memory volume"
        return warned(check, f"{size >> 20} MiB", remedy)
    return passed(check, f"{size / 2**30:.0f} GiB")


def locked_memory(facts: HostFacts) -> Finding:
    """Check the limit on locked memory, which InfiniBand needs."""
    check, limit = "locked memory", facts.host["locked_memory"]
    if limit is None:
        return passed(check, "unlimited")
    if not facts.infiniband:
        return passed(check, f"{limit >> 20} MiB, enough without InfiniBand")
    remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return failed(check, f"{limit >> 20} MiB; InfiniBand needs more", remedy)


def open_files(facts: HostFacts) -> Finding:
    """Check the limit on open files: sockets, data shards and checkpoint shards."""
    limit = facts.host["open_files"]
    if limit is not None and limit < MIN_OPEN_FILES:
        return warned("open files", f"{limit} at most", "ulimit -n 65536")
    return passed("open files", "unlimited" if limit is None else f"{limit:,}")


def cores(facts: HostFacts) -> Finding:
    """Check that there is at least one core per GPU."""
    have, used = facts.host["cores"], len(facts.devices) if facts.backend == "gpu" else 0
    said = f"{have:g} cores for {used} GPUs" if used else f"{have:g} cores"
    if have < used:
        remedy = "request more for the container or job: at least two per GPU"
        return warned("CPU cores", said, remedy)
    return passed("CPU cores", said)


def infiniband(facts: HostFacts) -> Finding:
    """Check for InfiniBand ports that are down."""
    check = "InfiniBand"
    if not facts.infiniband:
        return skipped(check, "no RDMA card in this host")
    name = lambda port: f"{port['card']}/{port['port']}"  # noqa: E731
    down = [f"{name(p)} {p['state']}" for p in facts.infiniband if "ACTIVE" not in p["state"]]
    if down:
        remedy = (
            "check cable, switch and subnet manager (ibstat), or exclude the card with NCCL_IB_HCA"
        )
        return warned(check, ", ".join(down), remedy)
    rates = sorted({f"{p['rate']}" for p in facts.infiniband})
    return passed(check, f"{len(facts.infiniband)} ports active, {' and '.join(rates)}")


#: Checks of one process, by section of the report.
VERSIONS: tuple[Callable[[HostFacts], Finding], ...] = (backend, driver, plugin, libraries)
HOST: tuple[Callable[[HostFacts], Finding], ...] = (
    shared_memory, locked_memory, open_files, cores, infiniband,
)  # fmt: skip


def check_versions(facts: HostFacts) -> list[Finding]:
    """Return the findings about installed versions and the environment."""
    return [*(one(facts) for one in VERSIONS), *environment(facts)]


def check_host(facts: HostFacts) -> list[Finding]:
    """Return the findings about a host, except its GPUs."""
    return [one(facts) for one in HOST]


# ------------------------------------------------------------------------------- all together


def same_versions(all_facts: Sequence[HostFacts]) -> Finding:
    """Check that all processes have the same versions. Different programs can deadlock."""
    check, first = "same versions", all_facts[0]
    if len(all_facts) == 1:
        return skipped(check, "one process")
    others = differing(all_facts, lambda facts: facts.versions)
    python = {facts.versions["python"].rpartition(".")[0] for facts in all_facts}
    said = "; ".join(others.values())
    if len(python) > 1 or any(name in SAME_CODE for name in others):
        return failed(check, said, f"install the versions of {first.name} in every environment")
    if others:
        return warned(
            check, said, "install the same versions everywhere: speed and rounding may differ"
        )
    return passed(check, f"in all {len(all_facts)} processes")


def same_environment(all_facts: Sequence[HostFacts]) -> Finding:
    """Check that all processes have the same variables.

    XLA's and JAX's change the program, NCCL's only how it communicates.
    """
    check, ours = "same environment", ("XLA_FLAGS", "JAX_", "NCCL_")
    if len(all_facts) == 1:
        return skipped(check, "one process")
    own = ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")

    def named(facts: HostFacts) -> dict[str, str]:
        there = facts.environment.items()
        return {k: v for k, v in there if k.startswith(ours) and k not in own}

    others = differing(all_facts, named)
    said, remedy = "; ".join(others.values()), "set them to the same values in all processes"
    if any(not name.startswith("NCCL_") for name in others):
        return failed(check, said, remedy)
    if others:
        return warned(check, said, remedy)
    return passed(check, f"in all {len(all_facts)} processes")


def same_gpus(all_facts: Sequence[HostFacts]) -> Finding:
    """Check that all processes have the same devices. A mesh is as fast as its slowest GPU."""
    kinds = {f"{len(facts.devices)} x {next(iter(facts.devices), '-')}" for facts in all_facts}
    if len(all_facts) == 1:
        return skipped("same devices", "one process")
    if len(kinds) > 1:
        remedy = "give every process the same number of devices of the same kind"
        return failed("same devices", ", ".join(sorted(kinds)), remedy)
    return passed("same devices", f"{min(kinds)} in each process")


def clock_skew(times: Sequence[float], names: Sequence[str], hosts: Sequence[str]) -> Finding:
    """Check the difference between the hosts' clocks.

    Args:     times: seconds since the epoch, read in each process right after a barrier.
    """
    check = "clocks of hosts"
    if len(set(hosts)) == 1:
        return skipped(check, "one host")
    order = sorted(range(len(times)), key=times.__getitem__)
    skew = times[order[-1]] - times[order[0]]
    said = f"{skew:.3f} s between {names[order[0]]} and {names[order[-1]]}"
    if skew > CLOCK_SKEW:
        return warned(check, said, "run chrony or ntpd on every host")
    return passed(check, f"{said}, including the message exchange")


def differing(
    all_facts: Sequence[HostFacts], values: Callable[[HostFacts], dict[str, str]]
) -> dict[str, str]:
    """Return a description of each value that differs between processes, by name."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(map(values, all_facts))))
    told = {}
    for name in names:
        by_value: dict[str, list[str]] = {}
        for facts in all_facts:
            by_value.setdefault(values(facts).get(name, "-"), []).append(str(facts.process))
        if len(by_value) > 1:
            ways = [f"{v} in process {','.join(who)}" for v, who in by_value.items()]
            told[name] = f"{name}: {' and '.join(ways)}"
    return told


def check_together(all_facts: Sequence[HostFacts], times: Sequence[float]) -> list[Finding]:
    """Return the findings about all processes as one run."""
    if len(all_facts) == 1:
        return []
    names, hosts = [f.name for f in all_facts], [f.host["name"] for f in all_facts]
    return [
        same_versions(all_facts),
        same_environment(all_facts),
        same_gpus(all_facts),
        clock_skew(times, names, hosts),
    ]


def numa_binding(facts: HostFacts) -> Finding:
    """Check that a process runs only on CPUs near its GPUs."""
    check, numa = "NUMA binding", facts.numa
    if numa.nodes < 2 or not numa.own:
        return skipped(check, "one NUMA node" if numa.nodes < 2 else "no GPU that is known")
    nodes = {numa.node[gpu] for gpu in numa.own}
    known = tuple(sorted(node for node in nodes if node is not None))
    if None in nodes:
        return skipped(check, "the kernel does not know the NUMA nodes of the GPUs")
    near = set().union(*(read_cpus(numa.near[gpu]) for gpu in numa.own))
    allowed = read_cpus(numa.cpus)
    if allowed <= near:
        return passed(check, f"CPUs {numa.cpus}, near the GPUs on {on_nodes(known)}")
    said = f"on CPUs {numa.cpus}, but the GPUs are near CPUs {write_cpus(near)}"
    remedy = "start with jaxpar.launch, which binds; or set JAXPAR_NUMA=auto, as with srun"
    if not allowed & near:
        remedy = "give the job CPUs of the GPUs' node: srun --gpu-bind=closest --cpu-bind=cores"
    return warned(check, f"{said} ({on_nodes(known)})", remedy)
