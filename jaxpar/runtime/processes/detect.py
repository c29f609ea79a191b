"""Detect the rank of this process in its run, from flags or environment variables, without JAX.

Slurm, Open MPI, Kubernetes and Kubeflow each set their own variables. Variables that are incomplete
or contradict each other are an error.
"""

import ipaddress
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.numerals import only_digits

type Environment = Mapping[str, str]

#: Variables that `jaxpar.launch` sets: coordinator, number of processes, process id.
LAUNCHED = ("JAXPAR_COORDINATOR", "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID")

#: Variable that `jaxpar.launch` sets in a run with several launchers: the number of hosts. The
#: coordinator is then a process of its own.
NUM_HOSTS = "JAXPAR_NUM_HOSTS"

#: Ports for jobs that do not name one; below the ephemeral ports of operating systems.
FIRST_PORT, PORTS = 12_000, 16_000


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of a process in its run."""

    source: str
    """Where the place was read from."""
    coordinator: str
    """host:port on which process 0 listens."""
    num_processes: int
    process_id: int
    num_hosts: int | None = None
    """None if the source does not specify it."""
    local_processes: int = 1
    """Processes on this host that share its visible GPUs; 1 if each sees only its own GPUs."""
    local_id: int = 0
    """Index of this process among them."""
    serves: bool = True
    """Process 0 runs the coordinator. Otherwise its launcher does."""

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}"
        return f"{self.source}: {place}, coordinator {self.coordinator}"

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return self.coordinator.rpartition(":")[0].strip("[]")


def detect(cfg: Config, env: Environment) -> ProcessPlace | None:
    """Return this process's place in its run; None for a run of one process.

    Args:     cfg: its section `cluster` is used. env: `os.environ`.
    Raises:   ConfigError for variables or flags that are incomplete, malformed or contradictory,
              and for a loopback coordinator of processes on several hosts.
    """
    c = cfg.cluster
    if (c.num_processes == 0) != (c.process_id == -1):
        missing = "cluster.process_id" if c.process_id == -1 else "cluster.num_processes"
        rule = "must be set together with the other: num_processes and process_id"
        fix = f"set it to 0, 1, ... in each process: {flag('cluster.process_id', 0)}"
        raise ConfigError(missing, getattr(c, missing.split(".")[1]), rule, fix)
    if c.num_processes:
        if not c.coordinator:
            fix = f"use process 0's host and a free port: {flag('cluster.coordinator')} host:1234"
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
    """Return whether a host's name or address is that of the local host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def _from_environment(wanted: str, env: Environment) -> ProcessPlace | None:
    env = {name: value for name, value in env.items() if value}  # empty variables count as not set
    launched = _launched(env)
    if launched is not None or wanted == "none":
        return launched
    names = list(SOURCES) if wanted == "auto" else [wanted]
    found = [c for c in (SOURCES[name](env) for name in names) if c is not None]
    if wanted != "auto" and not found:
        rule = "is selected, but its variables are not set"
        raise ConfigError("cluster.detect", wanted, rule, f"use {flag('cluster.detect', 'auto')}")
    if "mpi" in (c.source for c in found):
        # In a Slurm job, Slurm's variables describe mpirun's daemons.
        found = [c for c in found if c.source != "slurm"]
    for other in found[1:]:
        if (other.num_processes, other.process_id) != (found[0].num_processes, found[0].process_id):
            told = f"{found[0]}; {other}"
            fix = f"select the right one: {flag('cluster.detect', other.source)}"
            raise ConfigError("environment", told, "contradicts itself", fix)
    return found[0] if found else None


def _check(c: ProcessPlace) -> None:
    """Raise ConfigError for an invalid place or address."""
    if not 0 <= c.process_id < c.num_processes:
        rule = f"process {c.process_id} is not one of {c.num_processes}, counted from 0"
        raise ConfigError("cluster.process_id", c.process_id, rule, "number them from 0")
    host, _, port = c.coordinator.rpartition(":")
    bare = ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host)  # on which JAX would crash
    if bare or not host or not only_digits(port) or not 0 < int(port) < 1 << 16:
        rule = "is not host:port" + "; an IPv6 address needs brackets" * bare
        like = f"[{host.strip('[]')}]:{port}" if bare else f"{host or c.coordinator}:1234"
        fix = f"use {flag('cluster.coordinator', like)}"
        raise ConfigError("cluster.coordinator", c.coordinator, rule, fix)
    if (c.num_hosts or 1) > 1 and is_loopback(c.host):
        rule = f"is a loopback address, but the processes are on {c.num_hosts} hosts"
        fix = f"use a name of process 0's host that all can resolve: {flag('cluster.coordinator')}"
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
        num_hosts=_number(env, NUM_HOSTS, 1),
        serves=NUM_HOSTS not in env,
    )


def _jax(env: Environment) -> ProcessPlace | None:
    """JAX's variables, which Kubeflow's Trainer sets; in an indexed Job, the index is the id."""
    indexed = "JOB_COMPLETION_INDEX" in env
    own = "JOB_COMPLETION_INDEX" if indexed and "JAX_PROCESS_ID" not in env else "JAX_PROCESS_ID"
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", own)
    values = _whole(env, "kubernetes" if indexed else "jax", names)
    if values is None:
        return None
    process_id = _number(env, own)
    if indexed and _number(env, "JOB_COMPLETION_INDEX") != process_id:
        told = f"JAX_PROCESS_ID={process_id} JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}"
        raise ConfigError("environment", told, "contradicts itself", "unset JAX_PROCESS_ID")
    return ProcessPlace(
        source="kubernetes" if indexed else "jax",
        coordinator=values[0],
        num_processes=_number(env, "JAX_NUM_PROCESSES"),
        process_id=process_id,
        # A pod is a host.
        num_hosts=_number(env, "JAX_NUM_PROCESSES") if indexed else None,
    )


def _kubeflow_jaxjob(env: Environment) -> ProcessPlace | None:
    """The variables of Kubeflow's older JAXJob."""
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    if not {"NUM_PROCESSES", "PROCESS_ID"} & env.keys():
        return None  # other programs also use the other two
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
    """The variables of torchrun, and of Kubeflow for PyTorch: PET_* count nodes of one process.

    A process that torchrun started uses torchrun's variables: PET_* were options of torchrun.
    """
    by_torchrun = "LOCAL_WORLD_SIZE" in env
    nodes = not by_torchrun and bool({"PET_NNODES", "PET_NODE_RANK"} & env.keys())
    prefix = "PET_" if nodes and "PET_MASTER_ADDR" in env else ""
    counts = ("PET_NNODES", "PET_NODE_RANK") if nodes else ("WORLD_SIZE", "RANK")
    if not nodes and not {"MASTER_ADDR", "RANK"} & env.keys():
        return None  # other programs also use WORLD_SIZE
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
    """Open MPI 4 (ORTE) and 5 (PRRTE); process 0 is assumed to run on the host of mpirun."""
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
        fix = f"set process 0's host: {flag('cluster.coordinator')} HOST:1234"
        raise ConfigError("environment", told, "does not name the host of mpirun", fix)
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
            rule = f"the job has {tasks} tasks, but this process was not started by srun"
            fix = f"start it with srun, or as one process with {flag('cluster.detect', 'none')}"
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


#: Detectors in order of preference, if several agree.
SOURCES: dict[str, Callable[[Environment], ProcessPlace | None]] = {
    "jax": _jax,
    "jaxjob": _kubeflow_jaxjob,
    "torch": _torch,
    "mpi": _open_mpi,
    "slurm": _slurm,
}


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu[03-07,12],login1" gives "gpu03"."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes).group())  # type: ignore[union-attr]


def _port(job: str) -> int:
    """Return a port that all processes of a job share, and that other jobs rarely use."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _address(host: str, port: object) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _whole(env: Environment, source: str, names: tuple[str, ...]) -> list[str] | None:
    """Return the variables' values; None if none is set.

    Raises:   ConfigError if only some are set.
    """
    missing = [name for name in names if not env.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        there = " ".join(f"{name}={env[name]}" for name in names if name not in missing)
        rule = f"is incomplete for {source}: {', '.join(missing)} not set"
        fix = f"set all, or run a single process with {flag('cluster.detect', 'none')}"
        raise ConfigError("environment", there, rule, fix)
    return [env[name] for name in names]


def _number(env: Environment, name: str, default: int | None = None, least: int = 0) -> int:
    """Return a variable as a number; torch's range of one, such as 2:2, is also a number.

    Raises:   ConfigError if it is not a number, or below the minimum.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    low, _, high = (text or "").partition(":")
    if not only_digits(low) or high not in ("", low):
        raise ConfigError(name, text, "is not an integer", "check what sets it")
    if int(low) < least:
        raise ConfigError(name, text, f"must be at least {least}", "check what sets it")
    return int(low)
