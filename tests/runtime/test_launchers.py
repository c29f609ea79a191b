"""Each process has its own place and its own GPUs, in the environment of every launcher."""

import collections

import pytest
from jax._src import clusters

from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime.processes import connecting
from jaxpar.runtime.processes.rendezvous import detect
from jaxpar.runtime.processes.sources import ProcessPlace
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, named
from tests.runtime import launchers
from tests.runtime.launchers import ALONE, JOBS, batch, open_mpi_5, step, torchrun


def with_flags(**values):
    return replace(Config(), **{f"cluster.{name}": value for name, value in values.items()})


def gpus_of(process: launchers.Process, place: ProcessPlace) -> list[int]:
    """The host's GPUs that it takes."""
    share = connecting.local_gpus(place, process.env, present=True)
    return process.sees if share is None else [process.sees[i] for i in share]


def check(job: launchers.Job, cfg: Config) -> None:
    """Each process has its own rank and GPUs, all are taken, and all know one coordinator."""
    places = [detect(cfg, process.env) for process in job]
    assert [place.process_id for place in places] == [process.rank for process in job]
    assert {place.num_processes for place in places} == {len(job)}
    assert len({place.coordinator for place in places}) == 1
    hosts = {process.host for process in job}
    if len(hosts) > 1:
        assert places[0].host in ("gpu01", "10.96.0.1", "llm-0.llm")
    taken = collections.defaultdict(list)
    for process, place in zip(job, places, strict=True):
        taken[process.host] += gpus_of(process, place)
    for host in hosts:
        seen = {gpu for process in job if process.host == host for gpu in process.sees}
        assert sorted(taken[host]) == sorted(seen), host


@pytest.mark.parametrize("name", JOBS)
def test_each_process_has_a_place_and_gpus_of_its_own(name):
    check(JOBS[name], Config())


def test_hosts_that_are_not_named_come_from_the_flag():
    for variables in (launchers.flux, launchers.hydra):
        job = launchers.inner([8, 8], variables)
        with pytest.raises(ConfigError, match=r"--cluster\.coordinator HOST:1234"):
            detect(Config(), job[3].env)
        check(job, with_flags(coordinator="gpu01:1234"))


def test_flags_leave_the_share_of_gpus_to_the_launcher():
    for process in JOBS["srun 24.05, --cpus-per-task"]:
        cfg = with_flags(coordinator="gpu01:9", num_processes=16, process_id=process.rank)
        assert gpus_of(process, detect(cfg, process.env)) == [process.rank % 8]


@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_alone(name):
    assert detect(Config(), ALONE[name]) is None


@pytest.mark.parametrize("name", JOBS)
def test_values_that_are_no_numbers_end_in_an_error_or_change_nothing(name):
    """Each variable empty, or not a number. If one is empty, an outer launcher's place may win."""
    process = JOBS[name][-1]
    right = detect(Config(), process.env)
    alone = not any(word in name for word in ("Slurm", "by srun", "salloc", "hand", "pods"))
    for variable in process.env:
        for value in ("", "x", "\u00b2", "-1", "9" * 5000):
            try:
                found = detect(Config(), process.env | {variable: value})
                if found is not None:
                    connecting.local_gpus(found, process.env, present=True)
            except ConfigError as error:
                assert "Fix: " in str(error)
                continue
            if alone or value:
                assert found is not None, (variable, value)
                ids = (found.process_id, found.num_processes)
                assert ids == (right.process_id, right.num_processes), (variable, value)


def test_complete_sources_that_contradict_each_other_are_refused():
    by_hand = {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    task = {k: str(v) for k, v in step([8], 3, 0, 3).items()}
    for other in (
        by_hand | {"RANK": "0"},  # of the batch script, in every task
        by_hand | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
        {k: str(v) for k, v in open_mpi_5([1], 0, 0, 0).items()},
        {k: str(v) for k, v in torchrun([1], 0, 0, 0).items()},  # each task would train alone
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "2"},
    ):
        with pytest.raises(ConfigError, match="contradicts itself") as error:
            detect(Config(), task | other)
        chosen = error.value.fix.split()[-1]
        detect(with_flags(detect=chosen), task | other)  # the fix works


def test_an_incomplete_source_is_named_where_another_is_used():
    found = detect(Config(), JOBS["srun, MASTER_ADDR by hand"][0].env)
    assert "incomplete for torch: RANK not set" in found.passed_over
    assert not detect(Config(), JOBS["Open MPI 5 in a batch script of Slurm"][0].env).passed_over


def test_a_job_of_several_tasks_still_needs_a_launcher():
    env = {k: str(v) for k, v in batch([8]).items()}
    with pytest.raises(ConfigError, match="was not started by srun"):
        detect(Config(), env)
    assert detect(with_flags(detect="none"), env) is None


#: The cluster of JAX that knows a job. It reads os.environ.
KNOWN_TO_JAX = {
    **{name: clusters.SlurmCluster for name in JOBS if name.startswith(("srun", "salloc"))},
    "Open MPI 4, one host": clusters.OmpiCluster,
    "Open MPI 4, two hosts": clusters.OmpiCluster,
}


@pytest.mark.parametrize("name", KNOWN_TO_JAX)
def test_places_are_those_that_jax_detects(name, monkeypatch):
    cluster = KNOWN_TO_JAX[name]
    for process in JOBS[name][:: len(JOBS[name]) - 1]:
        for variable, value in process.env.items():
            monkeypatch.setenv(variable, value)
        assert cluster.is_env_present()
        found = detect(Config(), process.env)
        assert found.num_processes == cluster.get_process_count()
        assert found.process_id == cluster.get_process_id()
        host = cluster.get_coordinator_address(None, None).rpartition(":")[0]
        assert found.host in (host, "127.0.0.1")


def place(**values) -> ProcessPlace:
    whole = {"source": "mpi", "coordinator": "a:1", "num_processes": 8, "process_id": 0} | values
    return ProcessPlace(**whole)


def test_gpus_can_be_named_in_jaxs_variable():
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_LOCAL_DEVICE_IDS": "2,3"}
    shares = place(local_processes=4, local_id=1)
    assert connecting.local_gpus(shares, env, present=True) == [2, 3]
    assert connecting.local_gpus(shares, env, present=False) is None
    for wrong in ("4", "x", "0,", "-1", "0;1"):
        with pytest.raises(ConfigError, match=r"GPUs from 0 to 3"):
            connecting.local_gpus(shares, env | {"JAX_LOCAL_DEVICE_IDS": wrong}, present=True)


def test_gpus_that_cannot_be_shared_are_refused():
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    with pytest.raises(ConfigError, match="3 processes of this host cannot share 4 GPUs evenly"):
        connecting.local_gpus(place(local_processes=3), env, present=True)
    beyond = place(local_processes=4, local_id=5)
    with pytest.raises(ConfigError, match="is not one of the 4 processes") as error:
        connecting.local_gpus(beyond, env, present=True)
    assert "JAX_LOCAL_DEVICE_IDS=0" in error.value.fix
    assert connecting.local_gpus(beyond, env | {"JAX_LOCAL_DEVICE_IDS": "0"}, present=True) == [0]


def test_gpus_are_known_by_what_the_driver_calls_them(monkeypatch):
    there = FakeNvml([named("0000:3b:00.0", "GPU-b"), named("0000:1b:00.0", "GPU-a")])
    known = connecting.identities
    monkeypatch.setattr(connecting.visible, "gpu_is_present", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with there.installed():
        assert known([1]) == ["GPU-b"]
        assert known(None) == ["GPU-a", "GPU-b"]
        assert connecting.taken([1], ["GPU-b"]) == "GPU 1 of the 2 that it sees (GPU-b)"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,GPU-b")
        assert known(None) == ["MIG-1", "GPU-b"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
        assert known(None) == []
    with FakeNvml(start=fake_nvml.NO_LIBRARY).installed():
        assert known([0]) == []


def test_two_processes_with_one_gpu_are_named():
    connecting.check_own([("a", ["GPU-1"]), ("a", ["GPU-2"]), ("b", []), ("b", [])])
    with pytest.raises(ConfigError) as error:
        connecting.check_own(
            [("a", ["GPU-1", "GPU-2"]), ("a", ["GPU-3"]), ("a", ["GPU-2", "GPU-1"])]
        )
    assert error.value.value == "GPU-2"
    assert error.value.rule == "processes 0 and 2 on a both took it, and 1 more GPU like it"
