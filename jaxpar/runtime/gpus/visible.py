"""The GPUs that are visible to this process, without starting JAX."""

import glob
import os
import subprocess


def gpu_is_present() -> bool:
    """Return whether this host has NVIDIA devices that JAX may use. Starts no backend."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS", "") != "cpu"


def visible_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES or of this host. Starts no backend."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return len([name for name in named.split(",") if name.strip() and name.strip() != "-1"])


def gpu_name() -> str:
    """Return the first GPU's name from the driver; empty if the query fails."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
