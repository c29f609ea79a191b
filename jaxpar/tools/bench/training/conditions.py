"""The conditions of a measurement, which every card records."""

import datetime
import hashlib
import platform
from pathlib import Path
from typing import Any

from jaxpar.jax_private.table import CUDA_VERSIONS
from jaxpar.runtime import provenance
from jaxpar.runtime.gpus import nvml, xla_flags


def of_this_process(environment: list[str], commit: str) -> dict[str, Any]:
    """Return versions, devices, GPU, flags, commit, time and host for a card.

    The values do not depend on where jaxpar is installed.
    """
    versions = provenance.versions()
    return {
        **versions,
        "xla_flags": xla_flags.alike_everywhere(versions["xla_flags"]),
        "gpu": gpu_facts(),
        "environment": [xla_flags.alike_everywhere(setting) for setting in environment],
        "commit": commit,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": host(),
    }


def host() -> str:
    """Return an anonymous ID of the host, which changes when it reboots."""
    try:  # shared by the containers of a host, whose names differ
        named = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        named = platform.node()
    return hashlib.sha256(named.strip().encode()).hexdigest()[:8]


def gpu_facts() -> str:
    """Return name, driver and power limit of the first GPU; empty without a GPU."""
    try:
        gpu = nvml.gpus()[0]
    except nvml.Unavailable:
        return ""
    limit = "[N/A]" if gpu.power_limit is None else f"{gpu.power_limit:.2f} W"
    return f"{gpu.name}, {gpu.driver_version}, {limit}"


def cudnn_version() -> int:
    """Return the version of cuDNN that JAX loaded, such as 91900; 0 without cuDNN."""
    cuda_versions = CUDA_VERSIONS.load().cuda_versions
    return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()
