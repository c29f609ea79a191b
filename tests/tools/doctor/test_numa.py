"""NUMA nodes: what the kernel says, and what the doctor says."""

import dataclasses

import pytest

from jaxpar.tools.doctor import showing
from jaxpar.tools.doctor.checks.host import numa_binding
from jaxpar.tools.doctor.facts import HostFacts, StartedAs, of_the_host
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, h200
from tests.runtime.kernel_files import GPUS, rdma, two_sockets

ADDRESSES = [way.split("/")[-1] for way, _ in GPUS]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two sockets with GPUs, of which this process has two on the first."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    two_sockets(tmp_path)
    places = [fake_nvml.named(address, f"GPU-{i}") for i, address in enumerate(ADDRESSES)]
    with FakeNvml([h200(i, **place) for i, place in enumerate(places)]).installed():
        yield tmp_path


def facts(root, **env) -> HostFacts:
    return of_the_host(env, StartedAs(coordinator="10.0.0.1"), root)


def test_a_host_as_it_should_be(root):
    own = facts(root)
    found = numa_binding(own)
    assert (found.status, found.said) == ("pass", "CPUs 0-3, near the GPUs on node 0")
    assert HostFacts.from_json(own.to_json()) == own


def test_a_process_on_all_cpus(root, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    found = numa_binding(facts(root))
    assert found.status == "warn" and "jaxpar.launch" in found.remedy
    assert found.said == "on CPUs 0-7, but the GPUs are near CPUs 0-3 (node 0)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert numa_binding(facts(root)).status == "pass"
    share = of_the_host({}, StartedAs(share=[1]), root)
    assert share.numa.own == [ADDRESSES[3]]
    assert numa_binding(share).status == "warn"


def test_a_process_on_the_other_socket(root, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 6})
    found = numa_binding(facts(root))
    assert found.status == "warn" and "--gpu-bind=closest" in found.remedy


def test_what_is_shown_of_a_host(root):
    rdma(root, "mlx5_7", "Ethernet")
    own = facts(root, NCCL_CROSS_NIC="1")
    assert [showing._gpu_cells(own, own.gpus[i])[-1] for i in (0, 2)] == ["0", "1"]
    unknown = dataclasses.replace(own.numa, node={})
    assert showing._gpu_cells(dataclasses.replace(own, numa=unknown), own.gpus[0])[-1] == "-"
    lines = list(showing._network(own.network))
    assert lines[0].startswith("  network to other hosts: ib, 2 active ports")
    assert "    NCCL_IB_HCA==mlx5_0:1,mlx5_1:1: set in runs on several hosts" in lines
    assert "    NCCL_CROSS_NIC=1: yours" in lines
