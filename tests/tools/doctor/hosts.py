"""A healthy host with eight H200s, and what a test breaks in it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpar.tools.doctor.facts import HostFacts, of_the_host
from tests.fake_nvml import FakeNvml, h200s


def facts_of(
    answers: Mapping[str, Any] | None = None, *, env: dict[str, str] | None = None, **fields
) -> HostFacts:
    """Facts of a process on the host, with JAX on its GPUs.

    Args:     answers: of NVML, other ones for every GPU. fields: in place of found.
    """
    with FakeNvml(h200s(**answers or {})).installed():
        return with_jax(of_the_host(env or {}), **fields)


def with_jax(found: HostFacts, **fields) -> HostFacts:
    """The facts of a host, with JAX on its eight GPUs. Args:     fields: in place of found."""
    versions = {"python": "3.12.1", "jaxpar": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2"}
    versions |= {"jax-cuda13-plugin": "0.11.2", "driver": found.versions.get("driver", "")}
    host = {"name": "gpu01", "cores": 96.0, "memory": 2 << 40, "numa_nodes": 2, "shm": 1 << 40}
    host |= {"shm_free": 1 << 40, "open_files": 1 << 20, "locked_memory": None, "system": "Linux"}
    host |= {"cuda_in_path": found.host["cuda_in_path"], "gpu_files": 8}
    ours = {"versions": versions, "host": host, "infiniband": [], "backend": "gpu"}
    return dataclasses.replace(found, **ours | {"devices": ["NVIDIA H200"] * 8} | fields)
