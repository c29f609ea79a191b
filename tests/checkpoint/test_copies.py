"""Copies of a state in host memory: their values and memory, and the thread that allocates it."""

import threading
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint import copies
from jaxpar.checkpoint.copies import HostCopy
from jaxpar.runtime.gpus.host_copies import CudaError
from tests.ranks import HANG, wait_for

pytestmark = pytest.mark.waits


@pytest.fixture
def state(devices):
    """Arrays on four devices: sharded, replicated in part and in full; of several dtypes."""
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    put = lambda values, *spec: jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    numbers = jnp.arange(64.0).reshape(8, 8)
    return {
        "sharded": put(numbers, "x", "y"),
        "in part": put(numbers.astype(jnp.bfloat16), "y"),
        "whole": put(numbers.astype(jnp.int32)),
        "scalar": put(jnp.int32(7)),
    }


def addresses(tree) -> set[int]:
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def test_a_copy_has_the_values_and_shards_of_the_state(state):
    with HostCopy(state) as host:
        host.begin()
        copy = host.take(state)
        for name, x in state.items():
            assert copy[name].dtype == x.dtype
            for shard, own in zip(copy[name].addressable_shards, x.addressable_shards, strict=True):
                assert shard.index == own.index and shard.replica_id == own.replica_id
                np.testing.assert_array_equal(shard.data, own.data)
        assert not addresses(copy) & addresses(state)


def test_every_copy_has_the_same_memory_and_replicas_share_it(state):
    with HostCopy(state) as host:
        first = addresses(host.take(state))
        assert len(first) == 4 + 2 + 1 + 1
        later = host.take(jax.tree.map(lambda x: x + 1, state))
        assert addresses(later) == first
        assert all(address % 4096 == 0 for address in first)
        np.testing.assert_array_equal(later["whole"], state["whole"] + 1)


def test_a_state_that_is_in_host_memory_in_part_is_copied_by_xla(state):
    kind = state["sharded"].sharding.with_memory_kind("pinned_host")
    state["sharded"] = jax.device_put(state["sharded"], kind)
    with HostCopy(state) as host:
        host.begin()
        assert host.by_xla
        copy = host.take(state)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(copy)} == {"pinned_host"}
        chex.assert_trees_all_equal(copy, state)


@pytest.fixture
def slow_memory(state, monkeypatch):
    """A copy's memory: (it, an array's has begun, let it end, how many have begun)."""
    begun, go_on, count = threading.Semaphore(0), threading.Semaphore(0), []

    def slow(num_bytes: int) -> np.ndarray:
        count.append(num_bytes)
        begun.release()
        assert go_on.acquire(timeout=HANG)
        return np.empty(num_bytes, np.uint8)

    monkeypatch.setattr(copies, "allocated", slow)
    return HostCopy(state), begun, go_on, count


def test_a_programs_first_run_waits_for_one_array_and_has_the_devices_alone(slow_memory):
    host, begun, go_on, count = slow_memory
    alone, done = threading.Event(), threading.Event()

    def first_run() -> None:
        with host.paused():
            alone.set()
            assert done.wait(HANG)

    with host:
        host.begin()
        assert begun.acquire(timeout=HANG)
        runs = threading.Thread(target=first_run)
        runs.start()
        assert not alone.wait(0.1)
        go_on.release()
        assert alone.wait(HANG)
        assert not begun.acquire(timeout=0.1)
        done.set()
        assert begun.acquire(timeout=HANG)
        runs.join()
        go_on.release(7)
    assert len(count) <= 8


def test_a_run_that_ends_waits_for_one_array_only(slow_memory):
    host, begun, go_on, count = slow_memory
    with host:
        host.begin()
        assert begun.acquire(timeout=HANG)
        threading.Thread(target=lambda: (wait_for(lambda: host._ended), go_on.release())).start()
    assert len(count) == 1


def test_without_memory_the_save_says_so(state, monkeypatch):
    def refuse(num_bytes: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(copies, "allocated", refuse)
    with HostCopy(state) as host:
        host.begin()
        with pytest.raises(MemoryError):
            host.take(state)
        monkeypatch.undo()
        chex.assert_trees_all_equal(host.take(state), state)  # later there is some


def test_a_copy_that_does_not_fit_in_the_host_is_refused(state, monkeypatch):
    monkeypatch.setattr(copies, "host_memory", lambda: 600)
    with HostCopy(state) as host:
        with pytest.raises(MemoryError, match=r"needs 0\.0 GB of host memory for each"):
            host.take(state)
        assert not host._memory


def test_a_state_on_gpus_is_copied_by_the_driver(state, monkeypatch):
    """Each part once, from the first device that holds it."""
    copied = []

    def copy(pairs) -> None:
        for array, memory in pairs:
            copied.append(array.device)
            memory[:] = np.asarray(array).reshape(-1).view(np.uint8)

    monkeypatch.setattr(copies, "copy_to_host", copy)
    with HostCopy(state) as host:
        chex.assert_trees_all_equal(host.take(state), state)
    assert len(copied) == 4 + 2 + 1 + 1


def test_if_the_driver_refuses_xla_copies(state, monkeypatch, capfd):
    def refuse(pairs) -> None:
        raise CudaError("cuMemcpyAsync has failed with error 1")

    monkeypatch.setattr(copies, "copy_to_host", refuse)
    with HostCopy(state) as host:
        for _ in range(2):
            copy = host.take(state)
            assert {x.sharding.memory_kind for x in jax.tree.leaves(copy)} == {"pinned_host"}
            chex.assert_trees_all_equal(copy, state)
    assert capfd.readouterr().err.count("WARNING") == 1


class Gpu:
    """Stands for a GPU of this host."""

    def __init__(self, number: int):
        self.id, self.platform = number, "gpu"


def test_each_gpu_has_a_cpu_device(monkeypatch):
    gpus = [Gpu(1), Gpu(0)]
    sharding = types.SimpleNamespace(memory_kind="device", device_set=set(gpus))
    leaves = [types.SimpleNamespace(sharding=sharding)]
    cpus = jax.devices("cpu")
    assert copies._host_devices(leaves) == {gpus[1]: cpus[0], gpus[0]: cpus[1]}
    monkeypatch.setattr(copies.jax, "devices", lambda platform: cpus[:1])
    assert copies._host_devices(leaves) is None  # too few
    monkeypatch.setattr(copies.jax, "devices", lambda platform: cpus)
    monkeypatch.setattr(copies.jax, "process_count", lambda: 2)
    assert copies._host_devices(leaves) is None
