"""Copies from GPUs into pinned host memory of the caller, through the CUDA driver.

XLA pins memory only by its own allocator. That takes up to twice what is needed, faults the pages
in one by one while it pins them (1 to 2.5 GB/s), and holds up all other use of the GPUs meanwhile.
Memory whose pages are there already is pinned at 44 GB/s (docs/experiments.md).
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

#: Bytes of pages that are made present at a time, without Python's lock.
PIECE = 64 << 20

#: Smaller memory is not pinned.
PINNED_FROM = 1 << 20

#: Alignment of host memory: a page. JAX shares memory with a NumPy array that is aligned to 64.
ALIGNMENT = 4096

#: Flags of the driver: memory pinned for all contexts; a stream that waits for no other.
_PORTABLE, _NON_BLOCKING = 1, 1


class CudaError(RuntimeError):
    """A call of the CUDA driver has failed."""


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the driver cannot be loaded: {error}") from error


def _call(name: str, *args: Any) -> None:
    """Raises:   CudaError."""
    if code := getattr(_driver(), name)(*args):
        raise CudaError(f"{name} has failed with error {code}")


@functools.cache
def _context(ordinal: int) -> ctypes.c_void_p:
    """Return the context of a device, which JAX uses too."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _use(device: jax.Device) -> None:
    """Make a GPU the current one of this thread."""
    _call("cuCtxSetCurrent", _context(device.local_hardware_id))


def pin(memory: np.ndarray, device: jax.Device) -> Callable[[], None]:
    """Pin memory for all GPUs. Call it on a thread that does not use JAX.

    Args:     device: any GPU of this process.
    Returns:  a function that unpins it, on such a thread.
    Raises:   CudaError. Copies to memory that is not pinned work too, more slowly.
    """
    address = ctypes.c_void_p(memory.ctypes.data)
    _use(device)
    _call("cuMemHostRegister_v2", address, ctypes.c_size_t(memory.nbytes), _PORTABLE)

    def unpin() -> None:
        _use(device)
        _call("cuMemHostUnregister", address)

    return unpin


def allocated(num_bytes: int) -> np.ndarray:
    """Return host memory, uint8 [num_bytes], that begins on a page. Raises:   MemoryError."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + num_bytes]


class PinnedMemory:
    """Host memory with all its pages present, and pinned where that helps."""

    def __init__(self, content: np.ndarray, device: jax.Device | None = None):
        """Args:     content: from `allocated`, or a mapped file. device: a GPU to pin it for."""
        self.content = content
        for start in range(0, content.nbytes, PIECE):
            content[start : start + PIECE : ALIGNMENT] = 0
        self._unpin: Callable[[], None] | None = None
        if device and device.platform == "gpu" and content.nbytes >= PINNED_FROM:
            with contextlib.suppress(CudaError):  # then copies are slower
                self._unpin = pin(content, device)

    def close(self) -> None:
        """Unpin it, on a thread that does not use JAX, and free it once no array is in it."""
        if self._unpin is not None:
            with contextlib.suppress(CudaError):
                self._unpin()
            self._unpin = None
        self.content = np.empty(0, np.uint8)


def copy_from_gpus(pairs: Iterable[tuple[jax.Array, np.ndarray]]) -> None:
    """Copy arrays to the host, from all GPUs at once. Blocks until done.

    Args:     pairs: a complete array on one GPU, and contiguous host memory of the same size.
    Raises:   CudaError.
    """
    by_device: dict[jax.Device, list[tuple[jax.Array, np.ndarray]]] = {}
    for array, memory in pairs:
        by_device.setdefault(array.device, []).append((array, memory))
    # On threads of their own: the driver's current device is a property of a thread.
    with ThreadPoolExecutor(max(len(by_device), 1), thread_name_prefix="copy") as pool:
        list(pool.map(_copy_from, by_device, by_device.values()))


def copy_to_host(pairs: list[tuple[jax.Array, np.ndarray]]) -> None:
    """Copy arrays to host memory, from GPUs as `copy_from_gpus`. Blocks until done.

    Args:     pairs: a complete array on one device, and contiguous host memory of the same size.
    Raises:   CudaError.
    """
    if jax.default_backend() == "gpu":
        copy_from_gpus(pairs)
    else:
        copy_by_numpy(pairs)


def copy_by_numpy(pairs: Iterable[tuple[jax.Array, np.ndarray]]) -> None:
    """Copy arrays of any memory to the host, one after the other. Args as `copy_to_host`."""
    for array, memory in pairs:
        np.copyto(memory.view(array.dtype).reshape(array.shape), np.asarray(array))


def _copy_from(device: jax.Device, pairs: list[tuple[jax.Array, np.ndarray]]) -> None:
    _use(device)
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    try:
        for array, memory in pairs:
            assert array.nbytes == memory.nbytes and memory.flags.c_contiguous
            to, source = memory.ctypes.data, array.unsafe_buffer_pointer()
            size = ctypes.c_size_t(array.nbytes)
            _call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), size, stream)
    finally:
        _call("cuStreamSynchronize", stream)
        _call("cuStreamDestroy_v2", stream)
