"""A healthy host with eight H200s, as `nvidia-smi` describes it; what a test breaks in it."""

import dataclasses
from pathlib import Path

from jaxpar.doctor.facts import HostFacts, of_the_host
from jaxpar.runtime.gpus import nvidia_smi

RECORDED = Path(__file__).with_name("recorded")

BANNER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0  |\n"


def nvidia_smi_of(*changes: tuple[str, str], unknown: tuple[str, ...] = ()):
    """`nvidia-smi` of the recorded host.

    Args:     changes: texts and what stands in their place. unknown: fields that the driver lacks.
    """

    def ask(arguments) -> str:
        first = arguments[0] if arguments else ""
        for field in unknown:
            if field in first.partition("=")[2].split(","):
                raise nvidia_smi.Unavailable(f'Field "{field}" is not a valid field to query.')
        files = {"--query-gpu": "gpus.csv", "--query-remapped-rows": "remapped.csv"}
        files |= {"topo": "topo.txt", "nvlink": "nvlink.txt"}
        name = files.get(first.partition("=")[0])
        text = (RECORDED / name).read_text("utf-8") if name else BANNER
        if first.startswith("--query"):
            text = only(text, first.partition("=")[2].split(","))
        for old, new in changes:
            text = text.replace(old, new)
        return text

    return ask


def only(text: str, fields: list[str]) -> str:
    """The columns asked for, in their order; throttle reasons by their older name, too."""
    rows = [line.split(", ") for line in text.splitlines()]
    names = [cell.partition(" ")[0] for cell in rows[0]]
    where = [names.index(f.replace("clocks_throttle", "clocks_event")) for f in fields]
    return "\n".join(", ".join(row[i] for i in where) for row in rows)


def facts_of(*changes: tuple[str, str], env: dict[str, str] | None = None, **fields) -> HostFacts:
    """Facts of a process on the host, with JAX on its GPUs. Args:     fields: in place of found."""
    found = of_the_host(env or {}, nvidia_smi_of(*changes))
    versions = {"python": "3.12.1", "jaxpar": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2"}
    versions |= {"jax-cuda13-plugin": "0.11.2", "driver": found.versions.get("driver", "")}
    host = {"name": "gpu01", "cores": 96.0, "memory": 2 << 40, "numa_nodes": 2, "shm": 1 << 40}
    host |= {"shm_free": 1 << 40, "open_files": 1 << 20, "locked_memory": None, "system": "Linux"}
    host |= {"cuda_in_path": found.host["cuda_in_path"], "gpu_files": 8}
    ours = {"versions": versions, "host": host, "infiniband": [], "backend": "gpu"}
    return dataclasses.replace(found, **ours | {"devices": ["NVIDIA H200"] * 8} | fields)
