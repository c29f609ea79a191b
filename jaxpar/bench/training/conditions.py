"""What a figure depends on: the conditions on every card."""

import datetime
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

from jaxpar.runtime import provenance
from jaxpar.runtime.gpus import xla_flags


def of_this_process(environment: list[str], commit: str) -> dict[str, Any]:
    """Versions, devices, GPU, flags, commit, time and host, as they go on a card: the same words
    wherever jaxpar is installed."""
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
    """The same on two cards of one host, until it is started anew; it tells nothing else."""
    try:  # containers of one host share it, where their names differ
        named = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        named = platform.node()
    return hashlib.sha256(named.strip().encode()).hexdigest()[:8]


def gpu_facts() -> str:
    """Name, driver and power limit of the first GPU; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True).splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def cudnn_version() -> int:
    """The cuDNN that JAX has loaded, as 91900; 0 without one."""
    from jax._src.lib import cuda_versions  # private, as all of cuDNN's bindings are

    return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()
