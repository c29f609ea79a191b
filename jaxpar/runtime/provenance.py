"""The provenance of a run or a benchmark: versions, devices, flags and commit."""

import os
import subprocess
from pathlib import Path

import jax
import jaxlib

import jaxpar


def checked_out_commit() -> str:
    """Return the commit of the source, with "+" if files were changed; empty without a checkout."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def libraries() -> dict[str, str]:
    """Return the versions of jaxpar and JAX. Starts no backend."""
    return {
        "jaxpar": jaxpar.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def versions() -> dict[str, str]:
    """Return versions, devices and flags, by their names in manifest.json and cards. Starts JAX."""
    device = jax.devices()[0]
    return {
        **libraries(),
        "platform": device.client.platform_version.split("\n")[0],
        "device": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
