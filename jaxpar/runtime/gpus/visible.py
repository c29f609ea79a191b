"""Which GPUs this process sees, without starting JAX."""

import glob
import os
import subprocess


def gpu_is_present() -> bool:
    """Whether this host has NVIDIA devices that JAX may use; starts no backend."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS", "") != "cpu"


def visible_gpus() -> int:
    """How many GPUs of this host a process may use, by CUDA_VISIBLE_DEVICES; starts no backend."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return len([name for name in named.split(",") if name.strip() and name.strip() != "-1"])


def gpu_name() -> str:
    """The first GPU's name, as its driver gives it; empty if it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
