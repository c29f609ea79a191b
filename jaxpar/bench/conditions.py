"""What a figure depends on: the conditions on every card, and the writing of cards."""

import json
import subprocess
from pathlib import Path
from typing import Any

from jaxpar import provenance


def of_this_process(environment: list[str], commit: str) -> dict[str, Any]:
    """Versions, devices, GPU, flags and commit, as they go on a card."""
    return {
        **provenance.versions(),
        "gpu": gpu_facts(),
        "environment": environment,
        "commit": commit,
    }


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


def write_json(path: str | Path, value: Any) -> None:
    """Write a card or a table, with the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
