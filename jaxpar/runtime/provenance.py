"""What a run or a figure must be quoted with: versions, devices, flags, commit."""

import os
import subprocess
from pathlib import Path

import jax
import jaxlib

import jaxpar


def checked_out_commit() -> str:
    """The commit of the source, with "+" when files differ from it; empty outside a checkout."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions() -> dict[str, str]:
    """Versions, devices and flags, by the names that manifest.json and cards have; starts JAX."""
    device = jax.devices()[0]
    return {
        "jaxpar": jaxpar.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.client.platform_version.split("\n")[0],
        "device": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
