"""The GPUs that are visible to this process, without starting JAX."""

import glob
import os
from collections.abc import Mapping

from jaxpar.runtime.gpus import nvml


def gpu_is_present() -> bool:
    """Return whether this host has NVIDIA devices that JAX may use. Starts no backend."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS", "") != "cpu"


def visible_gpu_ids(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or the indices of this host's. Starts no backend."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def visible_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES or of this host. Starts no backend."""
    return len(visible_gpu_ids())


def gpu_name() -> str:
    """Return the first GPU's name from the driver; empty if it does not respond."""
    return gpu_and_driver()[0]


def gpu_and_driver() -> tuple[str, str]:
    """Return the first GPU's name, and the driver's version; empty if it does not respond."""
    try:
        gpu = nvml.gpus()[0]
    except nvml.Unavailable:
        return "", ""
    return gpu.name, gpu.driver_version
