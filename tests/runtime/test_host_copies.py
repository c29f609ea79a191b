"""Calls of the CUDA driver, to one that stands for it: copies and pins in host memory."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.runtime.gpus import host_copies
from jaxpar.runtime.gpus.host_copies import CudaError, PinnedMemory, allocated, copy_from_gpus, pin


class Driver:
    """Notes every call; copies; and fails where it is told to."""

    def __init__(self, failing: str = ""):
        self.calls: list[str] = []
        self.failing = failing

    def __getattr__(self, name: str):
        def call(*args) -> int:
            self.calls.append(name)
            if name == self.failing:
                return 2  # out of memory
            if name == "cuMemcpyAsync":
                to, source, size, _ = args
                ctypes.memmove(to.value, source.value, size.value)
            return 0

        return call


@pytest.fixture
def driver(monkeypatch):
    """(the name of a failing call, or nothing) -> the driver from now on."""

    def use(failing: str = "") -> Driver:
        made = Driver(failing)
        monkeypatch.setattr(host_copies, "_driver", lambda: made)
        return made

    yield use
    host_copies._context.cache_clear()


def test_arrays_of_two_devices_are_copied(driver, devices):
    made = driver()
    arrays = [jax.device_put(jnp.arange(8.0) + i, devices[i % 2]) for i in range(4)]
    jax.block_until_ready(arrays)  # it takes complete ones
    memory = [np.zeros(32, np.uint8) for _ in arrays]
    copy_from_gpus(zip(arrays, memory, strict=True))
    for i, one in enumerate(memory):
        np.testing.assert_array_equal(one.view(np.float32), np.arange(8.0) + i)
    assert made.calls.count("cuStreamSynchronize") == made.calls.count("cuStreamDestroy_v2") == 2


def test_a_failed_call_is_an_error_and_the_stream_is_given_back(driver, devices):
    made = driver("cuMemcpyAsync")
    array = jax.device_put(jnp.arange(8.0), devices[0])
    with pytest.raises(CudaError, match="cuMemcpyAsync has failed with error 2"):
        copy_from_gpus([(array, np.zeros(32, np.uint8))])
    assert made.calls[-1] == "cuStreamDestroy_v2"


def test_memory_is_pinned_and_unpinned(driver, devices):
    made, memory = driver(), np.zeros(4096, np.uint8)
    unpin = pin(memory, devices[0])
    assert made.calls[-1] == "cuMemHostRegister_v2"
    unpin()
    assert made.calls[-1] == "cuMemHostUnregister"
    driver("cuMemHostRegister_v2")
    with pytest.raises(CudaError):
        pin(memory, devices[0])


class Gpu:
    """A GPU of this process."""

    platform, local_hardware_id = "gpu", 0


@pytest.mark.parametrize("size", [host_copies.PINNED_FROM, 4096])
def test_large_memory_is_present_and_pinned_until_it_is_closed(driver, size):
    made, content = driver(), allocated(size)
    memory = PinnedMemory(content, Gpu())
    assert memory.content is content and content.ctypes.data % host_copies.ALIGNMENT == 0
    memory.close()
    memory.close()
    pinned = ["cuMemHostRegister_v2", "cuMemHostUnregister"] if size > 4096 else []
    assert [name for name in made.calls if name.startswith("cuMemHost")] == pinned
    assert not memory.content.size


def test_memory_that_cannot_be_pinned_is_used_as_it_is(driver):
    made = driver("cuMemHostRegister_v2")
    memory = PinnedMemory(allocated(host_copies.PINNED_FROM), Gpu())
    memory.close()
    assert "cuMemHostUnregister" not in made.calls
