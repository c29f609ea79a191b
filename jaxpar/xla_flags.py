"""XLA flags as data: what is set, for which hardware, and what it gained when measured.

They are read once, when JAX starts its backend, so `apply` comes first in a program. A flag that
this JAX does not know would abort the process, so the table is tied to the JAX version. NVLink
multicast stays off: on shared hosts it can take the GPUs out of service.
"""

import glob
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One XLA flag and why it is set."""

    name: str
    value: str
    gain: str
    """Why it is set."""


#: For JAX 0.11 on Hopper GPUs.
FLAGS = (
    Flag("xla_gpu_enable_latency_hiding_scheduler", "true", "overlaps gathers with compute"),
    Flag("xla_gpu_all_gather_combine_threshold_bytes", "536870912", "one gather per layer"),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", "134217728", "one scatter per layer"),
)

#: Environment that belongs with them; a value the user has set stays.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def gpu_is_present() -> bool:
    """Whether this host has NVIDIA devices that JAX may use; starts no backend."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS", "") != "cpu"


def apply(choice: str) -> list[str]:
    """Set the flags and environment for this host. Must run before JAX starts its backend.

    Args:     choice: `run.xla_flags`. Flags already in XLA_FLAGS win.
    Returns:  what was set, one "name=value" each, for the log.
    """
    if choice == "none" or not gpu_is_present():
        return []
    given = os.environ.get("XLA_FLAGS", "")
    flags = [f"--{f.name}={f.value}" for f in FLAGS if f.name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*flags, given]).strip()
    unset = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(unset)
    return flags + [f"{name}={value}" for name, value in unset.items()]
