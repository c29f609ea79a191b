"""Reads the place of a process in its run from the variables of each launcher.

Each function returns the place, or None if its variables are not set, and raises ConfigError if
they are incomplete or malformed. Empty variables must have been removed from the environment.
Slurm's variables are as in the manuals of srun 20.11 to 25.05, section OUTPUT ENVIRONMENT
VARIABLES.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.config import ConfigError, flag
from jaxpar.config.numerals import only_digits
from jaxpar.runtime.processes.addresses import joined

type Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of a process in its run."""

    source: str
    """Where the place was read from."""
    coordinator: str
    """host:port on which process 0 listens. Empty if the source does not name the host."""
    num_processes: int
    process_id: int
    num_hosts: int | None = None
    """None if the source does not specify it."""
    local_processes: int = 1
    """Processes on this host that share its visible GPUs; 1 if each sees only its own GPUs, or if
    the source does not specify it."""
    local_id: int = 0
    """Index of this process among them."""
    bound: bool = False
    """The launcher shows each process only its own GPUs."""
    started: bool = False
    """A launcher that can run within another one started this process. Otherwise the variables may
    have been set by hand."""
    serves: bool = True
    """Process 0 runs the coordinator. Otherwise its launcher does."""
    passed_over: str = ""
    """Sources that were incomplete."""

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}"
        return f"{self.source}: {place}, coordinator {self.coordinator or 'unknown'}"

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return self.coordinator.rpartition(":")[0].strip("[]")


class NotANumber(ConfigError):
    """A variable of a launcher has another value than a launcher sets."""


def all_of(env: Environment, source: str, names: tuple[str, ...]) -> list[str] | None:
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


def number(env: Environment, name: str, default: int | None = None, least: int = 0) -> int:
    """Return a variable as a number; torch's range of one, such as 2:2, is also a number.

    Raises:   NotANumber if it is not a number, or below the minimum.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    low, _, high = (text or "").partition(":")
    if not only_digits(low) or len(low) > 9 or high not in ("", low):
        raise NotANumber(name, text, "is not an integer", "check what sets it")
    if int(low) < least:
        raise NotANumber(name, text, f"must be at least {least}", "check what sets it")
    return int(low)


#: A part of SLURM_TRES_PER_TASK that counts GPUs: gres/gpu=2, gres/gpu:h100=2, gres:gpu:h100:2.
_GPUS = re.compile(r"gres[/:]gpu(?:[:=](.*))?")

#: Ways of --gpu-bind that show each task GPUs of its own. Under `closest`, tasks share them.
_BINDING = re.compile(r"single|per_task|map|mask")


def slurm_task(env: Environment, port: int) -> ProcessPlace | None:
    """Return the place of a task of srun; None outside Slurm, and in a job of one task.

    Args:     port: of the coordinator.
    Raises:   ConfigError if srun has not started this process of a job of several tasks, or for
              variables that are incomplete or malformed.
    """
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} & env.keys():
        tasks = number(env, "SLURM_NTASKS", 1) if "SLURM_JOB_ID" in env else 1
        if tasks > 1:
            rule = f"the job has {tasks} tasks, but this process was not started by srun"
            fix = f"start it with srun, or as one process with {flag('cluster.detect', 'none')}"
            raise ConfigError("SLURM_NTASKS", env["SLURM_NTASKS"], rule, fix)
        return None
    names = "JOB_ID STEP_NUM_TASKS STEP_NODELIST STEP_NUM_NODES PROCID LOCALID".split()
    values = all_of(env, "slurm", tuple(f"SLURM_{name}" for name in names))
    assert values is not None
    count = number(env, "SLURM_STEP_NUM_TASKS")
    hosts = number(env, "SLURM_STEP_NUM_NODES", least=1)
    local_id = number(env, "SLURM_LOCALID")
    bound = gpus_are_bound(env)
    return ProcessPlace(
        source="slurm",
        coordinator=joined(first_host(env["SLURM_STEP_NODELIST"]), port),
        num_processes=count,
        process_id=number(env, "SLURM_PROCID"),
        num_hosts=hosts,
        local_processes=1 if bound else _tasks_here(env, -(-count // hosts)),
        local_id=0 if bound else local_id,
        bound=bound,
        started=True,
    )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu[03-07,12],login1" gives "gpu03".

    Raises:   ConfigError if the list begins with none.
    """
    found = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodes)
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""
    if not first or "[" in first:
        raise ConfigError("SLURM_STEP_NODELIST", nodes, "names no host", "check what sets it")
    return first


def gpus_are_bound(env: Environment) -> bool:
    """Return whether srun shows this task only its own GPUs.

    `--gpus-per-task` does so, unless `--gpu-bind=none` is given too. SLURM_TRES_PER_TASK may count
    CPUs alone: Slurm 23.11 and later export `--cpus-per-task` in it.

    Raises:   ConfigError for a number of GPUs that is none.
    """
    binding = env.get("SLURM_GPU_BIND", "")
    for part in re.split(r",(?=gres)|\+", env.get("SLURM_TRES_BIND", "")):
        found = _GPUS.fullmatch(part)
        binding += f",{found[1]}" if found and found[1] else ""
    if re.search(r"\bnone\b", binding):
        return False
    asked = 0
    for part in filter(None, env.get("SLURM_GPUS_PER_TASK", "").split(",")):
        asked += _count("SLURM_GPUS_PER_TASK", part.rpartition(":")[2])
    if not asked:
        for part in env.get("SLURM_TRES_PER_TASK", "").split(","):
            if found := _GPUS.fullmatch(part.strip()):
                asked += _count("SLURM_TRES_PER_TASK", re.split("[:=]", found[1] or "1")[-1])
    if asked:
        # A site, or the program before this one, may show each task all GPUs nevertheless.
        visible = env.get("CUDA_VISIBLE_DEVICES", "")
        return len([name for name in visible.split(",") if name.strip()]) <= asked
    return _BINDING.search(binding) is not None


def _count(name: str, text: str) -> int:
    return number({name: text}, name)


def _tasks_here(env: Environment, evenly: int) -> int:
    """Return the number of the step's tasks on this node, from a list such as "8(x2),4"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in env or "SLURM_NODEID" not in env:
        return evenly
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if not found:
            raise ConfigError(name, env[name], "is not a list of numbers", "check what sets it")
        counts += [int(found[1])] * int(found[2] or 1)
    node = number(env, "SLURM_NODEID")
    if node >= len(counts):
        rule = f"is not one of the {len(counts)} nodes of {name}"
        raise ConfigError("SLURM_NODEID", node, rule, "check what sets it")
    return counts[node]


#: Variables that `jaxpar.launch` sets: coordinator, number of processes, process id.
LAUNCHED = ("JAXPAR_COORDINATOR", "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID")

#: Variable that `jaxpar.launch` sets in a run with several launchers: the number of hosts. The
#: coordinator is then a process of its own.
NUM_HOSTS = "JAXPAR_NUM_HOSTS"

#: Ports for jobs that do not name one; below the ephemeral ports of operating systems.
FIRST_PORT, PORTS = 12_000, 16_000

#: Of each kind of MPI: number of processes, rank, number on this host, index on this host.
MPI = (
    # Open MPI, and Spectrum MPI under LSF's jsrun.
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    tuple(f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    # Hydra, of MPICH and Intel MPI.
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    # PALS, of HPE Cray systems under PBS.
    ("PMI_SIZE", "PMI_RANK", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK"),
)


def launched(env: Environment) -> ProcessPlace | None:
    """A process of `jaxpar.launch`."""
    values = all_of(env, "launch", LAUNCHED)
    if values is None:
        return None
    return ProcessPlace(
        source="launch",
        coordinator=values[0],
        num_processes=number(env, LAUNCHED[1]),
        process_id=number(env, LAUNCHED[2]),
        num_hosts=number(env, NUM_HOSTS, 1),
        serves=NUM_HOSTS not in env,
        bound=True,
    )


def jax(env: Environment) -> ProcessPlace | None:
    """JAX's variables, which Kubeflow's Trainer sets; in an indexed Job, the index is the id."""
    indexed = "JOB_COMPLETION_INDEX" in env
    own = "JOB_COMPLETION_INDEX" if indexed and "JAX_PROCESS_ID" not in env else "JAX_PROCESS_ID"
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", own)
    values = all_of(env, "kubernetes" if indexed else "jax", names)
    if values is None:
        return None
    process_id = number(env, own)
    if indexed and number(env, "JOB_COMPLETION_INDEX") != process_id:
        told = f"JAX_PROCESS_ID={process_id} JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}"
        raise ConfigError("environment", told, "contradicts itself", "unset JAX_PROCESS_ID")
    return ProcessPlace(
        source="kubernetes" if indexed else "jax",
        coordinator=values[0],
        num_processes=number(env, "JAX_NUM_PROCESSES"),
        process_id=process_id,
        # A pod is a host.
        num_hosts=number(env, "JAX_NUM_PROCESSES") if indexed else None,
    )


def kubeflow_jaxjob(env: Environment) -> ProcessPlace | None:
    """The variables of Kubeflow's older JAXJob."""
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
    if not {"NUM_PROCESSES", "PROCESS_ID"} & env.keys():
        return None  # other programs also use the other two
    values = all_of(env, "jaxjob", names)
    assert values is not None
    count = number(env, "NUM_PROCESSES")
    return ProcessPlace(
        source="jaxjob",
        coordinator=joined(values[0], values[1]),
        num_processes=count,
        process_id=number(env, "PROCESS_ID"),
        num_hosts=count,
    )


def torch(env: Environment) -> ProcessPlace | None:
    """The variables of torchrun, and of Kubeflow for PyTorch: PET_* count nodes of one process.

    A process that torchrun started uses torchrun's variables: PET_* were options of torchrun.
    """
    by_torchrun = "LOCAL_WORLD_SIZE" in env
    nodes = not by_torchrun and bool({"PET_NNODES", "PET_NODE_RANK"} & env.keys())
    prefix = "PET_" if nodes and "PET_MASTER_ADDR" in env else ""
    counts = ("PET_NNODES", "PET_NODE_RANK") if nodes else ("WORLD_SIZE", "RANK")
    if not nodes and not {"MASTER_ADDR", "RANK"} & env.keys():
        return None  # other programs also use WORLD_SIZE
    names = (f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT", *counts)
    values = all_of(env, "torch", (*names, "LOCAL_RANK") if by_torchrun else names)
    assert values is not None
    count, local = number(env, counts[0]), number(env, "LOCAL_WORLD_SIZE", 0)
    return ProcessPlace(
        source="torch",
        coordinator=joined(values[0], values[1]),
        num_processes=count,
        process_id=number(env, counts[1]),
        num_hosts=count if nodes else (-(-count // local) if local else None),
        local_processes=max(local, 1),
        local_id=number(env, "LOCAL_RANK") if local else 0,
        started=by_torchrun and bool({"TORCHELASTIC_RUN_ID", "GROUP_RANK"} & env.keys()),
    )


def mpi(env: Environment) -> ProcessPlace | None:
    """A process of mpirun or mpiexec, or of LSF's jsrun."""
    there = [names for names in MPI if env.keys() >= set(names)]
    if not there:
        partly = [names for names in MPI if env.keys() & set(names)]
        if partly and env.get(partly[0][0]) != "1":
            all_of(env, "mpi", partly[0])
        return None
    size, rank, local, local_id = (number(env, name) for name in there[0])
    number(env, there[0][2], least=1)
    host = "127.0.0.1" if size == local else _host_of_rank_0(env)
    uri, namespace = env.get("OMPI_MCA_orte_hnp_uri", ""), env.get("PMIX_NAMESPACE", "")
    jobs = (env.get(name, "") for name in ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"))
    job = next(filter(None, (namespace, uri.partition(".")[0], *jobs)), "mpi")
    return ProcessPlace(
        source="mpi",
        coordinator=joined(host, port_of(job)) if host else "",
        num_processes=size,
        process_id=rank,
        num_hosts=-(-size // local),
        local_processes=local,
        local_id=local_id,
        started=True,
    )


def _host_of_rank_0(env: Environment) -> str:
    """Return the host of mpirun, or the first one of its job; process 0 is assumed to run there.
    Empty if it is unknown."""
    uri, namespace = env.get("OMPI_MCA_orte_hnp_uri", ""), env.get("PMIX_NAMESPACE", "")
    four = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    five = re.match(r"prte(?:run)?-(.+)-\d+@\d+$", namespace)
    if four or five:
        return next(filter(None, (four or five).groups()))  # type: ignore[union-attr]
    hosts = env.get("LSB_MCPU_HOSTS", "").split()[::2]  # "batch5 1 node07 42 node08 42"
    if "JSM_NAMESPACE_SIZE" in env:
        return hosts[1] if len(hosts) > 1 else ""  # jsrun runs on the first, and its tasks do not
    if hosts:
        return hosts[0]
    nodes = env.get("SLURM_JOB_NODELIST", "")
    return first_host(nodes) if nodes else ""


def flux(env: Environment) -> ProcessPlace | None:
    """A task of `flux run`. Flux spreads tasks evenly, and does not name the hosts."""
    names = ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")
    if not {"FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"} & env.keys():
        return None  # the shell of an allocation
    values = all_of(env, "flux", names)
    assert values is not None
    size, hosts = number(env, "FLUX_JOB_SIZE"), number(env, "FLUX_JOB_NNODES", least=1)
    job = env.get("FLUX_JOB_ID", "flux")
    return ProcessPlace(
        source="flux",
        coordinator=joined("127.0.0.1", port_of(job)) if hosts == 1 else "",
        num_processes=size,
        process_id=number(env, "FLUX_TASK_RANK"),
        num_hosts=hosts,
        local_processes=max(-(-size // hosts), 1),
        local_id=number(env, "FLUX_TASK_LOCAL_ID"),
        started=True,
    )


def slurm(env: Environment) -> ProcessPlace | None:
    """A task of srun."""
    return slurm_task(env, port_of(f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', '0')}"))


#: Detectors in order of preference, if several agree: launchers from the innermost to the outermost
#: come after what was set by hand.
SOURCES: dict[str, Callable[[Environment], ProcessPlace | None]] = {
    "jax": jax,
    "jaxjob": kubeflow_jaxjob,
    "torch": torch,
    "mpi": mpi,
    "flux": flux,
    "slurm": slurm,
}


def port_of(job: str) -> int:
    """Return a port that all processes of a job share, and that other jobs rarely use."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
