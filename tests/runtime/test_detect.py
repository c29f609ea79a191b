"""Who a process is among those of a run, from flags and from what started it."""

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.processes.addresses import is_loopback

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
DAEMONS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
MPI_4 = MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPI_IPV6 = MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fd00::1,fd00::2]:34911"}
MPI_5 = MPI | {"PMIX_NAMESPACE": "prterun-gpu03-2145@1"}
TRAINER = {
    "JAX_COORDINATOR_ADDRESS": "llm-node-0-0.llm:29500",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}
JOB = {
    "JAX_COORDINATOR_ADDRESS": "llm-0.llm:29500",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}
JAXJOB = {
    "COORDINATOR_ADDRESS": "jaxjob-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "4",
    "PROCESS_ID": "2",
}
PET = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "llm-node-0-0.llm",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "2",
    "PET_NNODES": "4:4",
    "PET_NODE_RANK": "2",
}
TORCHRUN = {
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
}
LAUNCHED = {
    "JAXPAR_COORDINATOR": "127.0.0.1:4321",
    "JAXPAR_NUM_PROCESSES": "2",
    "JAXPAR_PROCESS_ID": "1",
}


def with_flags(**values):
    return replace(Config(), **{f"cluster.{name}": value for name, value in values.items()})


#: Environment, source, coordinator's host, processes, own, hosts, processes on the host, own there.
KNOWN = [
    (SLURM, "slurm", "gpu03", 16, 11, 2, 8, 3),
    (SLURM | {"SLURM_GPUS_PER_TASK": "1"}, "slurm", "gpu03", 16, 11, 2, 1, 0),
    (SLURM | {"SLURM_STEP_NODELIST": "a1,b[2-3]"}, "slurm", "a1", 16, 11, 2, 8, 3),
    (MPI_4, "mpi", "10.96.0.1", 16, 11, 2, 8, 3),
    (MPI_IPV6, "mpi", "fd00::1", 16, 11, 2, 8, 3),
    (MPI_5, "mpi", "gpu03", 16, 11, 2, 8, 3),
    (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, "mpi", "127.0.0.1", 16, 11, 1, 16, 3),
    (TRAINER, "jax", "llm-node-0-0.llm", 4, 2, None, 1, 0),
    (JOB, "kubernetes", "llm-0.llm", 4, 2, 4, 1, 0),
    (TRAINER | JOB, "kubernetes", "llm-0.llm", 4, 2, 4, 1, 0),
    (JAXJOB, "jaxjob", "jaxjob-worker-0", 4, 2, 4, 1, 0),
    (PET, "torch", "llm-node-0-0.llm", 4, 2, 4, 1, 0),
    (PYTORCHJOB, "torch", "job-master-0", 4, 2, 4, 1, 0),
    (TORCHRUN, "torch", "gpu03", 16, 11, 2, 8, 3),
    (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, "torch", "fd00::1", 16, 11, 2, 8, 3),
    # torchrun reads PET_* as its options, and leaves them to what it starts.
    (TORCHRUN | PET, "torch", "gpu03", 16, 11, 2, 8, 3),
    (TORCHRUN | {"PET_NPROC_PER_NODE": "8"}, "torch", "gpu03", 16, 11, 2, 8, 3),
    (LAUNCHED, "launch", "127.0.0.1", 2, 1, 1, 1, 0),
    # mpirun within a Slurm job: its daemons are the tasks that Slurm counts.
    (SLURM | DAEMONS | MPI_5, "mpi", "gpu03", 16, 11, 2, 8, 3),
    # The launcher in a task of its own.
    (SLURM | LAUNCHED, "launch", "127.0.0.1", 2, 1, 1, 1, 0),
]


@pytest.mark.parametrize(
    ("env", "source", "host", "count", "own", "hosts", "local", "local_id"), KNOWN
)
def test_what_started_it_is_seen(env, source, host, count, own, hosts, local, local_id):
    found = rendezvous.detect(Config(), env)
    assert (found.source, found.host, found.num_processes, found.process_id) == (
        source,
        host,
        count,
        own,
    )
    assert (found.num_hosts, found.local_processes, found.local_id) == (hosts, local, local_id)
    assert str(found) == f"{source}: process {own} of {count}, coordinator {found.coordinator}"
    assert 1 <= int(found.coordinator.rpartition(":")[2]) < 1 << 16
    assert found.coordinator.startswith("[") == (":" in found.host)


ALONE = [
    {},
    {"WORLD_SIZE": "8"},
    {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1"},
    SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"},
    MPI
    | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    JOB | {"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"},
    {"PET_NPROC_PER_NODE": "8"},
    # What is set to nothing is not set.
    *({name: ""} for name in ("NUM_PROCESSES", "RANK", "MASTER_ADDR", "SLURM_STEP_NUM_TASKS")),
]


@pytest.mark.parametrize("env", ALONE)
def test_one_process_is_alone(env):
    assert rendezvous.detect(Config(), env) is None


def test_a_ports_choice_is_the_jobs_own():
    ports = [
        rendezvous.detect(Config(), SLURM | {"SLURM_JOB_ID": str(i)}).coordinator for i in range(50)
    ]
    assert len(set(ports)) > 45
    assert rendezvous.detect(Config(), SLURM | {"SLURM_PROCID": "0"}).coordinator == (
        rendezvous.detect(Config(), SLURM).coordinator
    )


WRONG = [
    ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "SLURM_PROCID not set"),
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, "was not started by srun"),
    (SLURM | {"SLURM_PROCID": "16"}, "process 16 is not one of 16"),
    (SLURM | {"SLURM_PROCID": "one"}, "not an integer"),
    (SLURM | {"SLURM_PROCID": "\u00b2"}, "not an integer"),
    (SLURM | {"SLURM_STEP_NUM_NODES": "0"}, "must be at least 1"),
    (MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, "must be at least 1"),
    (TRAINER | {"JAX_COORDINATOR_ADDRESS": "host:\u00b2"}, "is not host:port"),
    (TRAINER | {"JAX_COORDINATOR_ADDRESS": "fd00::1:29500"}, "coordinator '[fd00::1]:29500'"),
    (SLURM | TRAINER, "contradicts itself"),
    (TRAINER | JOB | {"JOB_COMPLETION_INDEX": "3"}, "contradicts itself"),
    ({"JOB_COMPLETION_INDEX": "3"}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES not set"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID not set"),
    (TRAINER | {"JAX_COORDINATOR_ADDRESS": "host"}, "is not host:port"),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE, RANK not set"),
    (PET | {"PET_NNODES": "2:4"}, "not an integer"),
    (MPI, "does not name the host of mpirun"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "is incomplete for mpi: OMPI_COMM_WORLD_RANK, "),
    (JOB | {"JAX_COORDINATOR_ADDRESS": "localhost:29500"}, "the processes are on 4 hosts"),
    (PET | {"PET_MASTER_ADDR": "127.0.0.1"}, "the processes are on 4 hosts"),
    (SLURM | {"SLURM_STEP_NODELIST": "localhost"}, "the processes are on 2 hosts"),
    ({"NUM_PROCESSES": "2", "PROCESS_ID": "0"}, "COORDINATOR_ADDRESS, COORDINATOR_PORT not set"),
]


@pytest.mark.parametrize(("env", "rule"), WRONG)
def test_what_is_half_set_contradictory_or_impossible_is_refused(env, rule):
    with pytest.raises(ConfigError, match=r"Fix: ") as error:
        rendezvous.detect(Config(), env)
    assert rule in str(error.value)


def test_flags_say_it_all():
    cfg = with_flags(coordinator="10.0.0.1:99", num_processes=4, process_id=3)
    found = rendezvous.detect(cfg, SLURM | {"MASTER_ADDR": "elsewhere"})
    assert str(found) == "flags: process 3 of 4, coordinator 10.0.0.1:99"
    # Or the coordinator alone.
    found = rendezvous.detect(with_flags(coordinator="10.0.0.1:99"), MPI_5)
    assert (found.source, found.process_id, found.coordinator) == ("mpi", 11, "10.0.0.1:99")


WRONG_FLAGS = [
    ({"num_processes": 2}, "cluster.process_id", "must be set together"),
    ({"process_id": 0}, "cluster.num_processes", "must be set together"),
    ({"num_processes": 2, "process_id": 0}, "cluster.coordinator", "is needed"),
    (
        {"num_processes": 2, "process_id": 2, "coordinator": "a:1"},
        "cluster.process_id",
        "not one of",
    ),
    (
        {"num_processes": 2, "process_id": 1, "coordinator": "a:0"},
        "cluster.coordinator",
        "not host:port",
    ),
    ({"detect": "slurm"}, "cluster.detect", "its variables are not set"),
]


@pytest.mark.parametrize(("flags", "field", "rule"), WRONG_FLAGS)
def test_flags_that_cannot_be(flags, field, rule):
    with pytest.raises(ConfigError) as error:
        rendezvous.detect(with_flags(**flags), {})
    assert error.value.field == field and rule in error.value.rule


def test_one_source_can_be_named():
    both = SLURM | TRAINER
    assert rendezvous.detect(with_flags(detect="jax"), both).process_id == 2
    assert rendezvous.detect(with_flags(detect="slurm"), both).process_id == 11
    assert rendezvous.detect(with_flags(detect="none"), both) is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.1.1", "::1", "localhost", "localhost.localdomain"]
)
def test_loopback_addresses(host):
    assert is_loopback(host)
    assert not is_loopback("10.0.0.1") and not is_loopback("node-0.local")
