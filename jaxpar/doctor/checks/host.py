"""Are versions, environment and host fit for training, and alike in all processes?"""

import itertools
from collections.abc import Callable, Sequence

from jaxpar.config import Config
from jaxpar.doctor.checks import variables
from jaxpar.doctor.checks.findings import Finding, failed, passed, skipped, warned
from jaxpar.doctor.facts import HostFacts
from jaxpar.execution import xla_flag_table
from jaxpar.runtime.gpus import xla_flags

#: Oldest driver for each major version of CUDA.
#: Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
OLDEST_DRIVER = {"12": 525, "13": 580}

#: Bytes of /dev/shm below which NCCL's and data loaders' shared memory may not fit; a container
#: has 64 MiB unless told otherwise.
MIN_SHM_BYTES = 1 << 30

#: Files that a process may open, below which many hosts, shards and checkpoints meet the limit.
MIN_OPEN_FILES = 1024

#: Seconds between clocks of hosts from which logs and metrics of several hosts cannot be put
#: in order.
CLOCK_SKEW = 1.0

#: What must be the same in every process: a difference makes programs that wait for one another.
SAME_CODE = ("jaxpar", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")


def driver(facts: HostFacts) -> Finding:
    """Is the driver new enough for the CUDA that JAX's plugin is built for?"""
    check, version = "driver", facts.versions.get("driver", "")
    major = next((m for m in OLDEST_DRIVER if _plugin(facts, m) != "-"), None)
    if not facts.gpus or major is None:
        return skipped(check, "no GPU" if not facts.gpus else "JAX is installed without CUDA")
    needed, found = OLDEST_DRIVER[major], version.partition(".")[0]
    said = f"{version}, and CUDA {major} needs {needed} or newer"
    if found.isdigit() and int(found) < needed:
        return failed(check, said, "update the driver, or install jax[cuda12] where 525 is met")
    return passed(check, said)


def plugin(facts: HostFacts) -> Finding:
    """JAX refuses a plugin of another version than jaxlib's, and goes on with the CPU."""
    check, lib = "CUDA plugin", facts.versions.get("jaxlib", "-")
    found = {m: v for m in OLDEST_DRIVER if (v := _plugin(facts, m)) != "-"}
    if not found:
        return skipped(check, "JAX is installed without CUDA")
    said = ", ".join(f"jax-cuda{m}-plugin {v}" for m, v in found.items()) + f", jaxlib {lib}"
    if len(found) > 1 or lib not in found.values():
        return failed(check, said, "install one of jaxlib's version: pip install 'jax[cuda13]'")
    return passed(check, said)


def _plugin(facts: HostFacts, major: str) -> str:
    return facts.versions.get(f"jax-cuda{major}-plugin", "-")


def backend(facts: HostFacts) -> Finding:
    """Does JAX use the GPUs that are there?"""
    check = "devices"
    if facts.backend_error:
        remedy = "read the error; run with JAX_PLATFORMS=cpu to see the rest of this report"
        return failed(check, f"JAX does not start: {facts.backend_error}", remedy)
    many = f"{len(facts.devices)} x {facts.devices[0]}" if facts.devices else "none"
    if facts.simulated:
        return passed(check, f"{len(facts.devices)} simulated CPU devices, as asked")
    there = len(facts.gpus) or facts.host["gpu_files"]
    if there and facts.backend != "gpu":
        remedy = "pip install 'jax[cuda13]'"
        if _plugin(facts, "12") != "-" or _plugin(facts, "13") != "-":
            remedy = "see what JAX said as it started, and the lines on driver and plugin"
        if "cpu" in facts.environment.get("JAX_PLATFORMS", ""):
            remedy = "unset JAX_PLATFORMS"
        return failed(check, f"JAX uses the CPU, and there are {there} GPUs", remedy)
    return passed(check, f"{many} ({facts.backend})")


def libraries(facts: HostFacts) -> Finding:
    """Other copies of CUDA's libraries come before those that JAX was installed with."""
    check, folders = "LD_LIBRARY_PATH", facts.host["cuda_in_path"]
    if not folders:
        return passed(check, "no CUDA in it")
    if not any(name.startswith("nvidia-") for name in facts.versions):
        return passed(check, f"CUDA is the host's own, in {':'.join(folders)}")
    remedy = "unset it, unless the CUDA in it is the one that you want"
    said = f"CUDA in {':'.join(folders)} comes before the packages of this environment"
    return warned(check, said, remedy)


def flags(facts: HostFacts) -> list[Finding]:
    """XLA_FLAGS against those that the project has measured on this GPU, and known slow ones."""
    given = variables.flags_of(facts.environment.get("XLA_FLAGS", ""))
    gpu = facts.gpus[0].get("name", "") if facts.gpus else ""
    rows = xla_flags.matching_rows(gpu, facts.versions.get("jax", ""), Config())
    found = []
    for row in rows:
        if row.name == xla_flag_table.TABLE:
            continue  # a table of one's own is as good: it may have been measured here
        if row.name in given and given[row.name] != row.value:
            said = f"--{row.name}={given[row.name]}, and {row.value} was measured: {row.gain}"
            found.append(warned("XLA_FLAGS", said, f"leave --{row.name} out"))
    for name, pattern, why in variables.SLOW_FLAGS:
        if name in given and variables.matches(pattern, given[name]):
            found.append(warned("XLA_FLAGS", f"--{name}={given[name]}: {why}", "leave it out"))
    return found


def environment(facts: HostFacts) -> list[Finding]:
    """Variables that hurt; one line that says so where there is none."""
    found = [*variables.check(facts.environment), *flags(facts)]
    return found or [passed("environment", "nothing that hurts")]


def shared_memory(facts: HostFacts) -> Finding:
    """/dev/shm, through which processes of a host talk."""
    check, size = "/dev/shm", facts.host["shm"]
    if size is None:
        return skipped(check, "not there")
    if size < MIN_SHM_BYTES:
        remedy = "give containers more: docker run --shm-size=16g; a memory volume in Kubernetes"
        return warned(check, f"{size >> 20} MiB", remedy)
    return passed(check, f"{size / 2**30:.0f} GiB")


def locked_memory(facts: HostFacts) -> Finding:
    """InfiniBand registers memory, which must be locked."""
    check, limit = "locked memory", facts.host["locked_memory"]
    if limit is None:
        return passed(check, "unlimited")
    if not facts.infiniband:
        return passed(check, f"{limit >> 20} MiB, and there is no InfiniBand to need more")
    remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return failed(check, f"{limit >> 20} MiB, and InfiniBand registers more than that", remedy)


def open_files(facts: HostFacts) -> Finding:
    """Sockets, shards of data and of checkpoints are files."""
    limit = facts.host["open_files"]
    if limit is not None and limit < MIN_OPEN_FILES:
        return warned("open files", f"{limit} at most", "ulimit -n 65536")
    return passed("open files", "unlimited" if limit is None else f"{limit:,}")


def cores(facts: HostFacts) -> Finding:
    """Each GPU is fed by threads of its own."""
    have, used = facts.host["cores"], len(facts.devices) if facts.backend == "gpu" else 0
    said = f"{have:g} cores for {used} GPUs" if used else f"{have:g} cores"
    if have < used:
        remedy = "give the container or the job more: two or more for each GPU"
        return warned("CPU cores", said, remedy)
    return passed("CPU cores", said)


def infiniband(facts: HostFacts) -> Finding:
    """Ports that are down."""
    check = "InfiniBand"
    if not facts.infiniband:
        return skipped(check, "no RDMA card in this host")
    name = lambda port: f"{port['card']}/{port['port']}"  # noqa: E731
    down = [f"{name(p)} {p['state']}" for p in facts.infiniband if "ACTIVE" not in p["state"]]
    if down:
        remedy = (
            "check cable, switch and subnet manager (ibstat), or leave the card out by NCCL_IB_HCA"
        )
        return warned(check, ", ".join(down), remedy)
    rates = sorted({f"{p['rate']}" for p in facts.infiniband})
    return passed(check, f"{len(facts.infiniband)} ports active, {' and '.join(rates)}")


#: Which process's checks these are, by section of the report.
VERSIONS: tuple[Callable[[HostFacts], Finding], ...] = (backend, driver, plugin, libraries)
HOST: tuple[Callable[[HostFacts], Finding], ...] = (
    shared_memory, locked_memory, open_files, cores, infiniband,
)  # fmt: skip


def check_versions(facts: HostFacts) -> list[Finding]:
    """What there is to say of what is installed and set."""
    return [*(one(facts) for one in VERSIONS), *environment(facts)]


def check_host(facts: HostFacts) -> list[Finding]:
    """What there is to say of a host, its GPUs apart."""
    return [one(facts) for one in HOST]


# ------------------------------------------------------------------------------- all together


def same_versions(all_facts: Sequence[HostFacts]) -> Finding:
    """Other code compiles other programs, which wait for one another for ever."""
    check, first = "same versions", all_facts[0]
    if len(all_facts) == 1:
        return skipped(check, "one process")
    others = differing(all_facts, lambda facts: facts.versions)
    python = {facts.versions["python"].rpartition(".")[0] for facts in all_facts}
    said = "; ".join(others.values())
    if len(python) > 1 or any(name in SAME_CODE for name in others):
        return failed(check, said, f"install the same as {first.name} has in every environment")
    if others:
        return warned(check, said, "install the same everywhere: speeds and last bits may differ")
    return passed(check, f"in all {len(all_facts)} processes")


def same_environment(all_facts: Sequence[HostFacts]) -> Finding:
    """XLA's and JAX's variables change the program; NCCL's, how it is carried out."""
    check, ours = "same environment", ("XLA_FLAGS", "JAX_", "NCCL_")
    if len(all_facts) == 1:
        return skipped(check, "one process")
    own = ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")

    def named(facts: HostFacts) -> dict[str, str]:
        there = facts.environment.items()
        return {k: v for k, v in there if k.startswith(ours) and k not in own}

    others = differing(all_facts, named)
    said, remedy = "; ".join(others.values()), "set them alike for all processes"
    if any(not name.startswith("NCCL_") for name in others):
        return failed(check, said, remedy)
    if others:
        return warned(check, said, remedy)
    return passed(check, f"in all {len(all_facts)} processes")


def same_gpus(all_facts: Sequence[HostFacts]) -> Finding:
    """A mesh is as fast as its slowest GPU."""
    kinds = {f"{len(facts.devices)} x {next(iter(facts.devices), '-')}" for facts in all_facts}
    if len(all_facts) == 1:
        return skipped("same devices", "one process")
    if len(kinds) > 1:
        remedy = "give every process as many devices, of one kind"
        return failed("same devices", ", ".join(sorted(kinds)), remedy)
    return passed("same devices", f"{kinds.pop()} in each process")


def clock_skew(times: Sequence[float], names: Sequence[str], hosts: Sequence[str]) -> Finding:
    """How far hosts' clocks are apart.

    Args:     times: seconds since the epoch, taken in each process as all had come together.
    """
    check = "clocks of hosts"
    if len(set(hosts)) == 1:
        return skipped(check, "one host")
    order = sorted(range(len(times)), key=times.__getitem__)
    skew = times[order[-1]] - times[order[0]]
    said = f"{skew:.3f} s between {names[order[0]]} and {names[order[-1]]}"
    if skew > CLOCK_SKEW:
        return warned(check, said, "run chrony or ntpd on every host")
    return passed(check, f"{said}, the exchange of messages included")


def differing(
    all_facts: Sequence[HostFacts], values: Callable[[HostFacts], dict[str, str]]
) -> dict[str, str]:
    """By name, what is not the same in all processes, in words."""
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
    """What there is to say of all processes as one run."""
    if len(all_facts) == 1:
        return []
    names, hosts = [f.name for f in all_facts], [f.host["name"] for f in all_facts]
    return [
        same_versions(all_facts),
        same_environment(all_facts),
        same_gpus(all_facts),
        clock_skew(times, names, hosts),
    ]
