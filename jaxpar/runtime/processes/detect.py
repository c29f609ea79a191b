"""Which process of a run this one is, read from flags or from what started it. Knows no JAX.

Slurm, Open MPI, Kubernetes and Kubeflow each say it in variables of their own. Where these are
half set, or contradict one another, that is an error and not a guess.
"""

import ipaddress
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jaxpar.config import Config, ConfigError, flag

type Environment = Mapping[str, str]

#: Set for the ranks that `jaxpar.launch` starts: coordinator, number of processes, process.
LAUNCHED = ("JAXPAR_COORDINATOR", "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID")

#: Ports from here on, below those that systems hand out themselves, for jobs that name none.
FIRST_PORT, PORTS = 12_000, 16_000


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """One process among those of a run."""

    source: str
    """What said so."""
    coordinator: str
    """host:port on which process 0 listens."""
    num_processes: int
    process_id: int
    num_hosts: int | None = None
    """None where the source does not say."""
    local_processes: int = 1
    """Processes on this host that share its GPUs; those that see only their own count alone."""
    local_id: int = 0
    """This one among them."""

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}"
        return f"{self.source}: {place}, coordinator {self.coordinator}"

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return self.coordinator.rpartition(":")[0].strip("[]")


def detect(cfg: Config, env: Environment) -> ProcessPlace | None:
    """This process's place in its run; None for a run of one process.

    Args:     cfg: the section `cluster`. env: `os.environ`.
    Raises:   ConfigError for variables or flags that are half set, malformed or contradictory, and
              for a loopback coordinator of processes on several hosts.
    """
    c = cfg.cluster
    if (c.num_processes == 0) != (c.process_id == -1):
        missing = "cluster.process_id" if c.process_id == -1 else "cluster.num_processes"
        rule = "both say which process this is, and one is not set"
        fix = f"set it to 0, 1, ... in each process: {flag('cluster.process_id', 0)}"
        raise ConfigError(missing, getattr(c, missing.split(".")[1]), rule, fix)
    if c.num_processes:
        if not c.coordinator:
            fix = f"give process 0's host and a free port: {flag('cluster.coordinator')} host:1234"
            raise ConfigError("cluster.coordinator", "", "is needed with num_processes", fix)
        found: ProcessPlace | None = ProcessPlace(
            source="flags",
            coordinator=c.coordinator,
            num_processes=c.num_processes,
            process_id=c.process_id,
        )
    else:
        found = _from_environment(c.detect, env)
        if found is not None and c.coordinator:
            found = replace(found, coordinator=c.coordinator)
    if found is None or found.num_processes == 1:
        return None
    _check(found)
    return found


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means, on every host, that host itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def _from_environment(wanted: str, env: Environment) -> ProcessPlace | None:
    env = {name: value for name, value in env.items() if value}  # an empty one is not set
    launched = _launched(env)
    if launched is not None or wanted == "none":
        return launched
    names = list(SOURCES) if wanted == "auto" else [wanted]
    found = [c for c in (SOURCES[name](env) for name in names) if c is not None]
    if wanted != "auto" and not found:
        rule = "and its variables are not set"
        raise ConfigError("cluster.detect", wanted, rule, f"use {flag('cluster.detect', 'auto')}")
    if "mpi" in (c.source for c in found):
        # Within a Slurm job, Slurm's variables describe mpirun's own daemons.
        found = [c for c in found if c.source != "slurm"]
    for other in found[1:]:
        if (other.num_processes, other.process_id) != (found[0].num_processes, found[0].process_id):
            told = f"{found[0]}; {other}"
            fix = f"name the one that is right: {flag('cluster.detect', other.source)}"
            raise ConfigError("environment", told, "contradicts itself", fix)
    return found[0] if found else None


def _check(c: ProcessPlace) -> None:
    """Raises:   ConfigError for a place, or an address, that cannot be."""
    if not 0 <= c.process_id < c.num_processes:
        rule = f"process {c.process_id} is not one of {c.num_processes}, counted from 0"
        raise ConfigError("cluster.process_id", c.process_id, rule, "number them from 0")
    host, _, port = c.coordinator.rpartition(":")
    bare = ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host)  # of which JAX would crash
    if bare or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        rule = "is no host:port" + ", and an IPv6 address needs brackets" * bare
        like = f"[{host.strip('[]')}]:{port}" if bare else f"{host or c.coordinator}:1234"
        fix = f"use {flag('cluster.coordinator', like)}"
        raise ConfigError("cluster.coordinator", c.coordinator, rule, fix)
    if (c.num_hosts or 1) > 1 and is_loopback(c.host):
        rule = f"means each host itself, and the processes are on {c.num_hosts} hosts"
        fix = f"give a name of process 0's host that the others know: {flag('cluster.coordinator')}"
        raise ConfigError("cluster.coordinator", c.coordinator, rule, fix + f" HOST:{port}")


# ------------------------------------------------------------------------- one for each source


def _launched(env: Environment) -> ProcessPlace | None:
    values = _whole(env, "launch", LAUNCHED)
    if values is None:
        return None
    coordinator, count, own = values
    return ProcessPlace(
        source="launch",
        coordinator=coordinator,
        num_processes=_number(env, LAUNCHED[1]),
        process_id=_number(env, LAUNCHED[2]),
        num_hosts=1,
    )


def _jax(env: Environment) -> ProcessPlace | None:
    """JAX's own names, which Kubeflow's Trainer sets; in an indexed Job, the index is the id."""
    indexed = "JOB_COMPLETION_INDEX" in env
    own = "JOB_COMPLETION_INDEX" if indexed and "JAX_PROCESS_ID" not in env else "JAX_PROCESS_ID"
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", own)
    values = _whole(env, "kubernetes" if indexed else "jax", names)
    if values is None:
        return None
    process_id = _number(env, own)
    if indexed and _number(env, "JOB_COMPLETION_INDEX") != process_id:
        told = f"JAX_PROCESS_ID={process_id} JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}"
        raise ConfigError("environment", told, "contradicts itself", "leave JAX_PROCESS_ID unset")
    return ProcessPlace(
        source="kubernetes" if indexed else "jax",
        coordinator=values[0],
        num_processes=_number(env, "JAX_NUM_PROCESSES"),
        process_id=process_id,
        # A pod is a host.
        num_hosts=_number(env, "JAX_NUM_PROCESSES") if indexed else None,
    )


def _kubeflow_jaxjob(env: Environment) -> ProcessPlace | None:
    """The names of Kubeflow's older JAXJob."""
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    if not {"NUM_PROCESSES", "PROCESS_ID"} & env.keys():
        return None  # the other two are anybody's
    values = _whole(env, "jaxjob", names)
    assert values is not None
    count = _number(env, "NUM_PROCESSES")
    return ProcessPlace(
        source="jaxjob",
        coordinator=_address(values[0], values[1]),
        num_processes=count,
        process_id=_number(env, "PROCESS_ID"),
        num_hosts=count,
    )


def _torch(env: Environment) -> ProcessPlace | None:
    """The names of torchrun, and of Kubeflow for PyTorch: PET_* counts nodes, one process each.

    Of a process that torchrun has started, those of torchrun: PET_* are options that it has read.
    """
    by_torchrun = "LOCAL_WORLD_SIZE" in env
    nodes = not by_torchrun and bool({"PET_NNODES", "PET_NODE_RANK"} & env.keys())
    prefix = "PET_" if nodes and "PET_MASTER_ADDR" in env else ""
    counts = ("PET_NNODES", "PET_NODE_RANK") if nodes else ("WORLD_SIZE", "RANK")
    if not nodes and not {"MASTER_ADDR", "RANK"} & env.keys():
        return None  # WORLD_SIZE alone is anybody's
    values = _whole(env, "torch", (f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT", *counts))
    assert values is not None
    count, local = _number(env, counts[0]), _number(env, "LOCAL_WORLD_SIZE", 0)
    return ProcessPlace(
        source="torch",
        coordinator=_address(values[0], values[1]),
        num_processes=count,
        process_id=_number(env, counts[1]),
        num_hosts=count if nodes else (-(-count // local) if local else None),
        local_processes=max(local, 1),
        local_id=_number(env, "LOCAL_RANK", 0) if local else 0,
    )


def _open_mpi(env: Environment) -> ProcessPlace | None:
    """Open MPI 4 (ORTE) and 5 (PRRTE); process 0 is taken to run where mpirun does."""
    names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    values = _whole(env, "mpi", tuple(f"OMPI_COMM_WORLD_{name}" for name in names))
    if values is None:
        return None
    size, rank, _, local_id = (_number(env, f"OMPI_COMM_WORLD_{name}") for name in names)
    local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    uri, namespace = env.get("OMPI_MCA_orte_hnp_uri", ""), env.get("PMIX_NAMESPACE", "")
    four = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    five = re.match(r"prterun-(.+)-\d+@\d+$", namespace)
    if size == local:
        host = "127.0.0.1"
    elif four or five:
        host = next(filter(None, (four or five).groups()))  # type: ignore[union-attr]
    else:
        told = f"OMPI_COMM_WORLD_SIZE={size}"
        fix = f"name process 0's host: {flag('cluster.coordinator')} HOST:1234"
        raise ConfigError("environment", told, "says no host of mpirun's", fix)
    return ProcessPlace(
        source="mpi",
        coordinator=_address(host, _port(namespace or uri.partition(".")[0] or "mpi")),
        num_processes=size,
        process_id=rank,
        num_hosts=-(-size // local),
        local_processes=local,
        local_id=local_id,
    )


def _slurm(env: Environment) -> ProcessPlace | None:
    """A task of srun."""
    if "SLURM_STEP_NUM_TASKS" not in env:
        tasks = env.get("SLURM_NTASKS", "1")
        if "SLURM_JOB_ID" in env and tasks != "1":
            rule = f"the job has {tasks} tasks, and this process was not started by srun"
            fix = f"start it with srun; or alone, with {flag('cluster.detect', 'none')}"
            raise ConfigError("SLURM_NTASKS", tasks, rule, fix)
        return None
    names = "JOB_ID STEP_NUM_TASKS STEP_NODELIST STEP_NUM_NODES PROCID LOCALID".split()
    values = _whole(env, "slurm", tuple(f"SLURM_{name}" for name in names))
    assert values is not None
    count = _number(env, "SLURM_STEP_NUM_TASKS")
    hosts = _number(env, "SLURM_STEP_NUM_NODES", least=1)
    bound = any(name in env for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
    step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    return ProcessPlace(
        source="slurm",
        coordinator=f"{first_host(env['SLURM_STEP_NODELIST'])}:{_port(step)}",
        num_processes=count,
        process_id=_number(env, "SLURM_PROCID"),
        num_hosts=hosts,
        local_processes=1 if bound else -(-count // hosts),
        local_id=0 if bound else _number(env, "SLURM_LOCALID"),
    )


#: In the order in which they are preferred when several agree.
SOURCES: dict[str, Callable[[Environment], ProcessPlace | None]] = {
    "jax": _jax,
    "jaxjob": _kubeflow_jaxjob,
    "torch": _torch,
    "mpi": _open_mpi,
    "slurm": _slurm,
}


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: "gpu[03-07,12],login1" gives "gpu03"."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes).group())  # type: ignore[union-attr]


def _port(job: str) -> int:
    """The same port in every process of a job, and seldom that of another job on the host."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _address(host: str, port: object) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _whole(env: Environment, source: str, names: tuple[str, ...]) -> list[str] | None:
    """The variables' values; None if none is set.

    Raises:   ConfigError when only some are.
    """
    missing = [name for name in names if not env.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        there = " ".join(f"{name}={env[name]}" for name in names if name not in missing)
        rule = f"is half of what {source} says, without {', '.join(missing)}"
        fix = f"set them too; or run alone, with {flag('cluster.detect', 'none')}"
        raise ConfigError("environment", there, rule, fix)
    return [env[name] for name in names]


def _number(env: Environment, name: str, default: int | None = None, least: int = 0) -> int:
    """Raises:   ConfigError for what is no number, or below the least. A range of one, as torch
    writes it, is one."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    low, _, high = (text or "").partition(":")
    if not low.isdecimal() or high not in ("", low):
        raise ConfigError(name, text, "is no whole number", "see what set it")
    if int(low) < least:
        raise ConfigError(name, text, f"must be at least {least}", "see what set it")
    return int(low)
