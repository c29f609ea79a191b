"""Environments of processes as launchers make them, with the GPUs that each process sees.

Taken from the manuals and sources of the launchers, by version; names of hosts and numbers of jobs
are made up. Only variables that could mislead a detection are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

type Job = list["Process"]


@dataclass(frozen=True)
class Process:
    """One process of a job.

    sees   numbers of the host's GPUs, as CUDA would count them in this process.
    """

    host: str
    rank: int
    env: dict[str, str] = field(hash=False)
    sees: list[int] = field(hash=False)


def _ranks(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Rank, node and index on the node, of as many processes on each node as counted."""
    rank = 0
    for node, count in enumerate(counts):
        for local in range(count):
            yield rank, node, local
            rank += 1


def _process(rank: int, node: int, env: dict, sees: list[int], cgroup: bool = False) -> Process:
    """With CUDA_VISIBLE_DEVICES: by the host's numbers, or from 0 where a cgroup hides others."""
    named = range(len(sees)) if cgroup else sees
    env = {k: str(v) for k, v in env.items()} | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, named))}
    return Process(f"gpu{node + 1:02}", rank, env, sees)


def _nodes(count: int) -> str:
    return "gpu01" if count == 1 else f"gpu[01-{count:02}]"


def _compressed(counts: list[int]) -> str:
    """[8, 8, 4] as "8(x2),4"."""
    if len(set(counts)) == 1 and len(counts) > 1:
        return f"{counts[0]}(x{len(counts)})"
    return ",".join(map(str, counts))


def batch(counts: list[int], **more) -> dict:
    """The environment of a batch script of sbatch, which all that it starts inherits."""
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_JOBID": 4711,
        "SLURM_NTASKS": sum(counts),
        "SLURM_NPROCS": sum(counts),
        "SLURM_NNODES": len(counts),
        "SLURM_JOB_NUM_NODES": len(counts),
        "SLURM_JOB_NODELIST": _nodes(len(counts)),
        "SLURM_TASKS_PER_NODE": _compressed(counts),
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": 0,
        "SLURM_GTIDS": 0,
        "SLURM_GPUS_ON_NODE": 8,
    } | more


def step(counts: list[int], rank: int, node: int, local: int, **more) -> dict:
    """What srun sets in a task."""
    return (
        batch(counts)
        | {
            "SLURM_STEP_ID": 0,
            "SLURM_STEPID": 0,
            "SLURM_STEP_NUM_TASKS": sum(counts),
            "SLURM_STEP_NUM_NODES": len(counts),
            "SLURM_STEP_NODELIST": _nodes(len(counts)),
            "SLURM_STEP_TASKS_PER_NODE": _compressed(counts),
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
            "SLURMD_NODENAME": f"gpu{node + 1:02}",
        }
        | more
    )


def srun(counts: list[int], each: int = 0, cgroup: bool = True, **more) -> Job:
    """Tasks of srun. each: GPUs to which a task is bound; 0: all see the host's eight."""
    found = []
    for rank, node, local in _ranks(counts):
        sees = [local * each + i for i in range(each)] if each else list(range(8))
        found.append(_process(rank, node, step(counts, rank, node, local, **more), sees, cgroup))
    return found


def inner(counts: list[int], variables, outer=lambda rank, node: {}, gpus: int = 8) -> Job:
    """Processes of another launcher, all of which see the GPUs of their host.

    variables: of a rank, node and index there. outer: what is there of the launcher around it.
    """
    return [
        _process(
            rank, node, outer(rank, node) | variables(counts, rank, node, local), [*range(gpus)]
        )
        for rank, node, local in _ranks(counts)
    ]


def open_mpi_4(counts, rank, node, local) -> dict:
    return {
        "OMPI_COMM_WORLD_SIZE": sum(counts),
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": counts[node],
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        "OMPI_UNIVERSE_SIZE": sum(counts),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "PMIX_NAMESPACE": "1531576321",
        "PMIX_RANK": rank,
    }


def open_mpi_5(counts, rank, node, local) -> dict:
    old = open_mpi_4(counts, rank, node, local)
    del old["OMPI_MCA_orte_hnp_uri"]
    return old | {"PMIX_NAMESPACE": "prterun-gpu01-2145@1", "OMPI_VERSION": "5.0.7"}


def hydra(counts, rank, node, local) -> dict:
    """MPICH's mpiexec."""
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": sum(counts),
        "PMI_FD": 9,
        "MPI_LOCALNRANKS": counts[node],
        "MPI_LOCALRANKID": local,
    }


def intel_mpi(counts, rank, node, local) -> dict:
    return hydra(counts, rank, node, local) | {
        "I_MPI_ROOT": "/opt/intel/oneapi/mpi/2021.13",
        "I_MPI_HYDRA_BOOTSTRAP": "slurm",
        "HYDRA_BSTRAP_LOCALHOST": "gpu01",
    }


def pals(counts, rank, node, local) -> dict:
    """HPE Cray's mpiexec, under PBS."""
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": sum(counts),
        "PMI_LOCAL_RANK": local,
        "PMI_LOCAL_SIZE": counts[node],
        "PALS_RANKID": rank,
        "PALS_NODEID": node,
        "PBS_JOBID": "1234.pbs-01",
        "PBS_NODEFILE": "/var/spool/pbs/aux/1234.pbs-01",
    }


def jsrun(counts, rank, node, local) -> dict:
    """LSF's jsrun, with Spectrum MPI. The first host runs the batch script, and no task."""
    hosts = "".join(f" gpu{i + 1:02} 42" for i in range(len(counts)))
    names = {"SIZE": sum(counts), "RANK": rank, "LOCAL_SIZE": counts[node], "LOCAL_RANK": local}
    return {
        **{f"JSM_NAMESPACE_{name}": value for name, value in names.items()},
        **{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()},
        "PMIX_NAMESPACE": "3",
        "LSB_JOBID": 99,
        "LSB_MCPU_HOSTS": f"batch5 1{hosts}",
    }


def torchrun(counts, rank, node, local) -> dict:
    return {
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": 29500,
        "WORLD_SIZE": sum(counts),
        "RANK": rank,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": counts[node],
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(counts),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": sum(counts),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }


def flux(counts, rank, node, local) -> dict:
    """`flux run`, of which the tasks also have its PMI."""
    return {
        "FLUX_JOB_ID": "f2n7zSR3",
        "FLUX_JOB_SIZE": sum(counts),
        "FLUX_JOB_NNODES": len(counts),
        "FLUX_TASK_RANK": rank,
        "FLUX_TASK_LOCAL_ID": local,
        "FLUX_URI": "local:///run/flux/local",
        "PMI_RANK": rank,
        "PMI_SIZE": sum(counts),
        "PMI_FD": 12,
    }


def pods(count: int, **more) -> Job:
    """An indexed Job of Kubernetes, with one process in each pod."""
    job = {"JAX_COORDINATOR_ADDRESS": "llm-0.llm:29500", "JAX_NUM_PROCESSES": count}
    job |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} | more
    return [_process(i, i, job | {"JOB_COMPLETION_INDEX": i}, list(range(8))) for i in range(count)]


def _daemons(rank: int, node: int) -> dict:
    """mpirun's daemons are tasks of srun on all nodes but its own, which has the batch script's."""
    return batch([8, 8]) if node == 0 else step([1], 0, 0, 0) | {"SLURM_NTASKS": 16}


def _agents(rank: int, node: int) -> dict:
    """srun starts one torchrun on each node."""
    return step([1, 1], node, node, 0, SLURM_TRES_PER_TASK="cpu=96")


def _brokers(rank: int, node: int) -> dict:
    """srun starts Flux on each node."""
    return step([1], 0, 0, 0)


_TRES = "SLURM_TRES_PER_TASK"

#: Jobs by name: what started them, and how.
JOBS: dict[str, Job] = {
    # Slurm without binding. 20.11 and 22.05 have no SLURM_TRES_PER_TASK.
    "srun 20.11": srun([8, 8], SLURM_CPUS_PER_TASK=12),
    "srun 22.05, one node": srun([8], SLURM_CPUS_PER_TASK=12),
    "srun 23.11, --cpus-per-task": srun([8, 8], **{_TRES: "cpu:12", "SLURM_CPUS_PER_TASK": 12}),
    "srun 24.05, --cpus-per-task": srun([8, 8], **{_TRES: "cpu=12", "SLURM_CPUS_PER_TASK": 12}),
    "srun 24.11, other resources": srun([8], **{_TRES: "cpu=12,gres/nvme=2,license/a=1"}),
    "srun 25.05, --gpu-bind=none": srun(
        [8], SLURM_GPUS_PER_TASK=1, SLURM_GPU_BIND="none", **{_TRES: "cpu=12,gres/gpu=1"}
    ),
    "srun 25.05, --tres-bind none": srun(
        [8], **{_TRES: "gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:verbose,none"}
    ),
    "srun, --gpus-per-task=0": srun([8], SLURM_GPUS_PER_TASK=0),
    "srun, --gpus-per-task where GPUs are not constrained": srun([8], SLURM_GPUS_PER_TASK=1),
    "srun, a task on each node": srun([1, 1, 1], **{_TRES: "cpu=96"}),
    "srun, two tasks on each node": srun([2, 2]),
    "srun, unequal": srun([8, 8, 4]),
    "srun, unequal, one after the other": srun([4, 8]),
    # Bound.
    "srun 20.11, --gpus-per-task=1": srun([8, 8], 1, SLURM_GPUS_PER_TASK=1),
    "srun 22.05, --gpus-per-task=h100:2": srun([4, 4], 2, SLURM_GPUS_PER_TASK="h100:2"),
    "srun 23.11, --gpus-per-task=1": srun(
        [8], 1, **{_TRES: "cpu:12,gres:gpu:1", "SLURM_GPUS_PER_TASK": 1}
    ),
    "srun 24.05, --tres-per-task": srun([4], 2, **{_TRES: "cpu=24,gres/gpu=2"}),
    "srun 24.11, --tres-per-task of a type": srun([4], 2, **{_TRES: "gres/gpu:h100=2,cpu=24"}),
    "srun 24.11, a type and a colon": srun([4], 2, **{_TRES: "gres/gpu:h100:2"}),
    "srun 25.05, bound without a cgroup": srun([8], 1, False, SLURM_GPUS_PER_TASK=1),
    "srun, --gpu-bind=mask_gpu": srun([4], 2, SLURM_GPU_BIND="mask_gpu:0x3,0xc,0x30,0xc0"),
    "srun, --ntasks-per-gpu=1": srun([8], 1, SLURM_GPU_BIND="single:1", SLURM_NTASKS_PER_GPU=1),
    "srun, unequal and bound": srun([8, 4], 1, SLURM_GPUS_PER_TASK=1),
    # srun within a shell of salloc, whose variables it replaces.
    "salloc, then srun": srun([8], SLURM_NTASKS=8, SLURM_INTERACT=1),
    "srun --mpi=pmi2": [
        _process(p.rank, 0, p.env | {"PMI_RANK": p.rank, "PMI_SIZE": 8, "PMI_FD": 14}, p.sees)
        for p in srun([8])
    ],
    "srun --mpi=pmix": [
        _process(
            p.rank, 0, p.env | {"PMIX_RANK": p.rank, "PMIX_NAMESPACE": "slurm.pmix.4711.0"}, p.sees
        )
        for p in srun([8])
    ],
    # Variables for PyTorch that a script sets by habit, complete or not.
    "srun, MASTER_ADDR by hand": srun([8], MASTER_ADDR="gpu01", MASTER_PORT=29500, WORLD_SIZE=8),
    "srun, torch's variables by hand": [
        _process(
            p.rank,
            0,
            p.env | {"MASTER_ADDR": "gpu01", "MASTER_PORT": 29500, "WORLD_SIZE": 8, "RANK": p.rank},
            p.sees,
        )
        for p in srun([8])
    ],
    "srun, JAX's variables by hand": [
        _process(
            p.rank,
            0,
            p.env
            | {
                "JAX_COORDINATOR_ADDRESS": "gpu01:29500",
                "JAX_NUM_PROCESSES": 8,
                "JAX_PROCESS_ID": p.rank,
            },
            p.sees,
        )
        for p in srun([8])
    ],
    # mpirun.
    "Open MPI 4, one host": inner([8], open_mpi_4),
    "Open MPI 4, two hosts": inner([8, 8], open_mpi_4),
    "Open MPI 5, two hosts": inner([8, 8], open_mpi_5),
    "Open MPI 5, unequal": inner([8, 4], open_mpi_5),
    "Open MPI 4 in a batch script of Slurm": inner([8, 8], open_mpi_4, _daemons),
    "Open MPI 5 in a batch script of Slurm": inner([8, 8], open_mpi_5, _daemons),
    "Open MPI 5 in a shell of salloc": inner([8], open_mpi_5, lambda *_: batch([8])),
    "MPICH, one host": inner([8], hydra),
    "MPICH in a batch script of Slurm": inner([8, 8], hydra, _daemons),
    "Intel MPI in a batch script of Slurm": inner([8, 8], intel_mpi, _daemons),
    "PBS, HPE's mpiexec": inner([8], pals),
    "PBS, Open MPI 5": inner([4, 4], open_mpi_5, lambda *_: {"PBS_JOBID": "1234.pbs-01"}),
    "LSF, jsrun": inner([6, 6], jsrun, gpus=6),
    # torchrun.
    "torchrun, one host": inner([8], torchrun),
    "torchrun, two hosts": inner([8, 8], torchrun),
    "torchrun in a batch script of Slurm": inner([8], torchrun, lambda *_: batch([8])),
    "torchrun, one by srun on each host": inner([8, 8], torchrun, _agents),
    "torchrun in pods": inner([8, 8], torchrun, lambda _, node: {"JOB_COMPLETION_INDEX": node}),
    # Flux.
    "Flux, one host": inner([8], flux),
    "Flux in Slurm": inner([8], flux, _brokers),
    # Kubernetes.
    "an indexed Job": pods(4),
    "a JobSet": pods(4, JOBSET_NAME="llm", REPLICATED_JOB_NAME="node", JOB_INDEX=0),
    "jaxpar.launch as a task of srun": [
        _process(
            i,
            0,
            step([1, 1], 0, 0, 0)
            | {
                "JAXPAR_COORDINATOR": "127.0.0.1:4321",
                "JAXPAR_NUM_PROCESSES": 2,
                "JAXPAR_PROCESS_ID": i,
            },
            [4 * i + k for k in range(4)],
        )
        for i in range(2)
    ],
}

#: A single process, in environments that have launchers' variables.
ALONE: dict[str, dict] = {
    "a shell of salloc's interactive step": step([1, 1], 0, 0, 0, SLURM_STEP_NUM_TASKS=1)
    | {"SLURM_STEP_ID": 4294967290, "SLURM_NTASKS": 16},
    "srun --pty": step([1], 0, 0, 0),
    "srun of one task, MASTER_ADDR by hand": step([1], 0, 0, 0, MASTER_ADDR="a", MASTER_PORT=1),
    "ssh into a host of a job": {"SLURM_JOB_ID": 4711},
    "an IDE in a job of one task": batch([1]),
    "PBS": {"PBS_JOBID": "1234.pbs-01", "PBS_NODEFILE": "/x", "PBS_TASKNUM": 1},
    "LSF": {"LSB_JOBID": 99, "LSB_MCPU_HOSTS": "batch5 1 gpu01 42"},
    "the shell of flux alloc": {"FLUX_URI": "local:///x", "FLUX_JOB_SIZE": 2, "FLUX_JOB_NNODES": 2},
    "mpirun -n 1": open_mpi_5([1], 0, 0, 0),
    "mpirun -n 1 in a batch script of Slurm": batch([8]) | open_mpi_5([1], 0, 0, 0),
    "mpiexec -n 1": hydra([1], 0, 0, 0),
    "PMI of one": {"PMI_RANK": 0, "PMI_SIZE": 1, "PMI_FD": 5},
    "torchrun of one": torchrun([1], 0, 0, 0),
    "a pod": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "llm-0"},
}
ALONE = {name: {k: str(v) for k, v in env.items()} for name, env in ALONE.items()}
