"""Which CPUs are near a process's GPUs, and that a process is bound to them."""

import os
import subprocess
import sys

import pytest

from jaxpar.runtime.gpus import numa, visible
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, named
from tests.runtime.kernel_files import GPUS, gpu, two_sockets, write

pytestmark = pytest.mark.waits

ADDRESSES = [way.split("/")[-1] for way, _ in GPUS]
ALL = set(range(8))


@pytest.fixture
def root(tmp_path):
    two_sockets(tmp_path)
    return tmp_path


def test_lists_of_cpus():
    assert numa.read_cpus("0-3,8\n") == {0, 1, 2, 3, 8} and numa.read_cpus("") == set()
    assert numa.write_cpus({8, 0, 1, 2, 3}) == "0-3,8" and numa.write_cpus({5}) == "5"


def test_gpus_by_index_and_uuid(root):
    with FakeNvml(start=fake_nvml.NO_DRIVER).installed():
        there = numa.gpus_on_pci(root)
    assert list(there) == ADDRESSES
    assert numa.addresses_of(["2", "0"], there) == [ADDRESSES[2], ADDRESSES[0]]
    assert numa.addresses_of(["GPU-9baa"], there) == [ADDRESSES[3]]
    assert numa.addresses_of(["4"], there) == numa.addresses_of(["MIG-1"], there) == []


def test_a_job_may_use_only_some_gpus(root):
    """Slurm's cgroup hides the others from CUDA and NVML, but not from the driver's files."""
    own = [named(ADDRESSES[3], "GPU-b"), named(ADDRESSES[2], "GPU-a")]
    with FakeNvml([fake_nvml.FORBIDDEN, *own]).installed():
        there = numa.gpus_on_pci(root)
    assert there == {ADDRESSES[2]: "GPU-a", ADDRESSES[3]: "GPU-b"}
    assert numa.addresses_of(["0"], there) == [ADDRESSES[2]]


def test_a_process_goes_to_the_node_of_its_gpus(root):
    found = numa.plan(ADDRESSES[2:], ALL, root)
    assert (found.cpus, found.nodes) == ({4, 5, 6, 7}, (1,))


def test_what_a_job_was_given_is_kept(root):
    assert numa.plan(ADDRESSES[:1], {1, 2, 6}, root).cpus == {1, 2}
    elsewhere = numa.plan(ADDRESSES[:1], {5, 6}, root)
    assert not elsewhere.cpus and not elsewhere.well and "CPUs 5-6" in elsewhere.why


def test_gpus_of_both_nodes_need_all_cpus(root):
    found = numa.plan(ADDRESSES, ALL, root)
    assert not found.cpus and found.well and "nodes 0 and 1" in found.why


def test_a_kernel_that_does_not_know_nodes(root):
    write(root / "sys/bus/pci/devices" / ADDRESSES[0] / "numa_node", "-1")
    assert "does not know" in numa.plan(ADDRESSES[:1], ALL, root).why
    assert not numa.plan([], ALL, root).well


def test_one_node_needs_nothing(tmp_path):
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-7")
    gpu(tmp_path, GPUS[0][0], 0, "0-7")
    assert numa.plan(ADDRESSES[:1], ALL, tmp_path).well


#: Binds itself as a process of two, on a host of the test's files, and prints what it has then.
BOUND = """
import ctypes, os, sys, threading
from pathlib import Path
from jaxpar.runtime.gpus import numa, visible
from tests.fake_nvml import NO_DRIVER, FakeNvml
started = threading.Event()
seen = []
def other():
    started.wait()
    seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=other)
thread.start()
visible.gpu_is_present = lambda: True
own = sorted(os.sched_getaffinity(0))
with FakeNvml(start=NO_DRIVER).installed():
    print(numa.bind_process(os.environ, [0], Path(sys.argv[1])))
started.set()
thread.join()
mode = ctypes.c_int()
ctypes.CDLL(None).syscall(numa.SET_MEMPOLICY["x86_64"] + 1, ctypes.byref(mode), None, 0, None, 0)
print(sorted(os.sched_getaffinity(0)), sorted(seen[0]), mode.value)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single CPU")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="get_mempolicy has another number")
def test_threads_and_memory_are_bound(tmp_path):
    own = sorted(os.sched_getaffinity(0))
    for node in 0, 1:
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", "")
        gpu(tmp_path, GPUS[2 * node][0], 0, str(own[node]))

    def run(asked):
        env = os.environ | {numa.VARIABLE: asked, "CUDA_VISIBLE_DEVICES": "1,0"}
        command = [sys.executable, "-c", BOUND, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    told, found = run("auto")
    assert f"NUMA: CPUs {own[1]} of node 0, near the GPUs" in told
    policy = numa.MPOL_PREFERRED if "memory there first" in told else 0
    assert found == f"[{own[1]}] [{own[1]}] {policy}"
    assert run("off") == ["[]", f"{own} {own} 0"]


def test_nothing_is_bound_without_gpus(monkeypatch, root):
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    assert numa.bind_process({numa.VARIABLE: "auto"}, None, root) == []
