"""Read the place of a process from the variables of each launcher.

Each function returns the place, or None if its variables are not set, and raises ConfigError if
they are incomplete or malformed. Empty variables must have been removed from the environment.
"""

import re
import zlib
from collections.abc import Callable

from jaxpar.config import ConfigError
from jaxpar.runtime.processes.addresses import joined
from jaxpar.runtime.processes.place import Environment, ProcessPlace, all_of, number
from jaxpar.runtime.processes.slurm import first_host, slurm_task

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
