"""Marks the steps that NVIDIA's profilers measure: from cuProfilerStart to cuProfilerStop.

    ncu  --profile-from-start off ...
    nsys profile --capture-range=cudaProfilerApi ...

measure only what runs in between. Without such a tool, the marks have no effect.

Source:   CUDA Driver API, "Profiler Control".
"""

import contextlib
import ctypes
from collections.abc import Iterator

#: NVIDIA's driver, which every process with a GPU has loaded.
_LIBRARY = "libcuda.so.1"


@contextlib.contextmanager
def marked_for_nvidia(device: int = 0) -> Iterator[None]:
    """Mark what runs in this context. The caller waits for the GPU at both ends.

    Args:     device: number of a GPU of this process, whose primary context (which JAX uses) tells
              the driver of the marks. They hold for all GPUs of the process.
    Raises:   OSError without NVIDIA's driver. RuntimeError if the driver refuses.
    """
    driver = ctypes.CDLL(_LIBRARY)
    context = ctypes.c_void_p()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(driver, "cuCtxPushCurrent_v2", context)
    _call(driver, "cuProfilerStart")
    try:
        yield
    finally:
        _call(driver, "cuProfilerStop")
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
        _call(driver, "cuDevicePrimaryCtxRelease_v2", device)


def _call(driver: ctypes.CDLL, name: str, *args: object) -> None:
    code = getattr(driver, name)(*args)
    if code:
        raise RuntimeError(f"{name} returned CUDA error {code}")
