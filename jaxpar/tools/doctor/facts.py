"""Facts that a process reads about itself and its host before anything is measured."""

import dataclasses
import functools
import glob
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import declared
from jaxpar.jax_private.table import CUDA_VERSIONS
from jaxpar.runtime.gpus import numa, nvml, visible
from jaxpar.runtime.gpus.nvml import GpuFacts
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes.networks import host as networks
from jaxpar.runtime.processes.networks.choosing import choose
from jaxpar.runtime.processes.networks.host import rdma_ports


@dataclass(frozen=True)
class NumaFacts:
    """The NUMA nodes of a host; GPUs by their PCI addresses.

    nodes       number of NUMA nodes. cpus   those that this process may use, as "0-3,8".
    own         this process's GPUs. near   the CPUs near each GPU. node   its NUMA node.
    """

    nodes: int = 1
    cpus: str = ""
    own: list[str] = field(default_factory=list)
    near: dict[str, str] = field(default_factory=dict)
    node: dict[str, int | None] = field(default_factory=dict)


def read_numa(ids: Sequence[str], root: Path = numa.ROOT) -> NumaFacts:
    """Read the facts about NUMA nodes.

    Args:     ids: this process's GPUs, as in CUDA_VISIBLE_DEVICES. root: of the kernel's files.
    """
    there = numa.gpus_on_pci(root)
    return NumaFacts(
        nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        cpus=numa.write_cpus(os.sched_getaffinity(0)),
        own=numa.addresses_of(ids, there),
        near={gpu: numa.write_cpus(numa.local_cpus(gpu, root)) for gpu in there},
        node={gpu: numa.numa_node(gpu, root) for gpu in there},
    )


#: Packages whose versions are recorded, in addition to NVIDIA's; "-" if not installed.
PACKAGES = tuple(
    "jaxpar jax jaxlib jax-cuda12-plugin jax-cuda13-plugin jax-triton triton flax optax "
    "orbax-checkpoint numpy ml-dtypes tensorstore tokenizers pyarrow safetensors lm-eval".split()
)

#: Prefixes of environment variables that affect JAX, XLA, NCCL or CUDA.
VARIABLES = ("NCCL_", "XLA_", "JAX_", "CUDA_", "TF_CPP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "UCX_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about one process and its host.

    versions      of Python, packages and libraries.
    environment   variables with a prefix in VARIABLES, before this program set its own.
    host          name, cores, memory and /dev/shm (bytes), limits (None: unlimited), GPUs by
                  their files in /dev, and folders in LD_LIBRARY_PATH that contain CUDA.
    gpus          what NVML says of each GPU of the host. driver_error   why `gpus` is empty.
    links         between GPUs, as from `nvml.links`. infiniband   RDMA ports, as from `rdma_ports`.
    numa          NUMA nodes of GPUs and CPUs.
    network       the network to other hosts and its variables: the fields of `NetworkChoice`.
    backend, devices   what JAX uses: "gpu" or "cpu", and the kind of each local device.
    backend_error   why JAX did not start.
    simulated     whether the devices are simulated on request.
    """

    process: int
    versions: dict[str, str]
    environment: dict[str, str]
    host: dict[str, Any]
    gpus: list[GpuFacts] = dataclasses.field(default_factory=list)
    driver_error: str = ""
    links: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    infiniband: list[dict[str, str]] = dataclasses.field(default_factory=list)
    numa: NumaFacts = dataclasses.field(default_factory=NumaFacts)
    network: dict[str, Any] = dataclasses.field(default_factory=dict)
    backend: str = ""
    devices: list[str] = dataclasses.field(default_factory=list)
    backend_error: str = ""
    simulated: bool = False

    @property
    def name(self) -> str:
        """The process's name in messages."""
        return f"process {self.process} ({self.host['name']})"

    def to_json(self) -> str:
        """Serialize the facts, to send them to process 0."""
        return declared.to_json(self)

    @staticmethod
    def from_json(text: str) -> "HostFacts":
        """Restore facts from `to_json`."""
        return declared.read(HostFacts, text.encode(), what="the facts of a process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedAs:
    """What a process knows of itself from its command line and launcher.

    network   `cluster.network`. coordinator   process 0's host; "" for a single process.
    share     which of the visible GPUs are this process's; None: all.
    """

    network: str = "auto"
    coordinator: str = ""
    share: list[int] | None = None


def of_the_host(
    environment: Mapping[str, str],
    started: StartedAs = StartedAs(),
    root: Path = numa.ROOT,
) -> HostFacts:
    """Read all facts that are available before JAX starts.

    Args:     environment: `os.environ`, as set by the user. root: of the kernel's files.
    Raises:   ConfigError for a network that the host does not have.
    """
    found: dict[str, Any] = {}
    ids = visible.visible_gpu_ids()
    own = ids if started.share is None else [ids[i] for i in started.share]
    wanted = "auto" if started.network == "none" else started.network
    network = choose(wanted, networks.read(started.coordinator, environment, root), environment)
    versions = _versions()
    try:
        found["gpus"], found["links"] = nvml.gpus(), nvml.links()
        driver = {"driver": found["gpus"][0].driver_version, "driver CUDA": nvml.cuda_of_driver()}
        versions = versions | driver
    except nvml.Unavailable as error:
        found["driver_error"] = str(error)
    return HostFacts(
        process=0,
        versions=versions,
        environment={k: v for k, v in sorted(environment.items()) if k.startswith(VARIABLES)},
        host=_host() | {"cuda_in_path": cuda_in_path(environment.get("LD_LIBRARY_PATH", ""))},
        infiniband=rdma_ports(root / "sys/class/infiniband"),
        numa=read_numa(own, root),
        network=json.loads(json.dumps(dataclasses.asdict(network))),
        **found,
    )


def with_devices(facts: HostFacts, process: int, simulated: bool) -> HostFacts:
    """Return the facts with JAX's devices added. Starts JAX's backend."""
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        # With JAX_PLATFORMS=cuda and no visible GPU, JAX fails an assertion without a message.
        asked = os.environ.get("JAX_PLATFORMS")
        text = " ".join(str(error).split()) or f"there is no device for JAX_PLATFORMS={asked}"
        return dataclasses.replace(facts, process=process, backend_error=text)
    return dataclasses.replace(
        facts,
        process=process,
        backend=devices[0].platform,
        devices=[device.device_kind for device in devices],
        versions=facts.versions | _cuda_libraries(),
        simulated=simulated,
    )


@functools.cache  # every package's metadata is read
def _versions() -> dict[str, str]:
    names = [d.metadata["Name"] or "" for d in importlib.metadata.distributions()]
    nvidia = sorted({n for n in names if n.lower().startswith("nvidia-")})
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *nvidia):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


#: CUDA's libraries by their names in JAX, with the units of their major and minor versions:
#: 13050 is CUDA 13.5, 91900 is cuDNN 9.19.
LIBRARIES = {
    "CUDA runtime": ("cuda_runtime", 1000, 10),
    "cuDNN": ("cudnn", 10_000, 100),
    "cuBLAS": ("cublas", 10_000, 100),
}


def _cuda_libraries() -> dict[str, str]:
    """Return the versions of the CUDA libraries that JAX loads; "-" for one that it cannot load.

    They may differ from the installed packages.
    """
    cuda_versions, found = CUDA_VERSIONS.load().cuda_versions, {}
    for name, (library, major, minor) in LIBRARIES.items():
        ask = getattr(cuda_versions, f"{library}_get_version", None)
        try:
            if ask is not None:
                found[name] = f"{ask() // major}.{ask() % major // minor}"
        except RuntimeError:
            found[name] = "-"
    return found


def cuda_in_path(path: str) -> list[str]:
    """Return the folders of LD_LIBRARY_PATH with CUDA libraries that JAX installs as packages."""
    names = ("libcudart", "libcublas", "libcudnn", "libnccl")
    folders = [folder for folder in path.split(":") if folder]
    return [f for f in folders if any(any(Path(f).glob(f"{name}.so*")) for name in names)]


def _host() -> dict[str, Any]:
    soft = {
        name: resource.getrlimit(number)[0]
        for name, number in (
            ("open_files", resource.RLIMIT_NOFILE),
            ("locked_memory", resource.RLIMIT_MEMLOCK),
        )
    }
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": _cores(),
        "gpu_files": len(glob.glob("/dev/nvidia[0-9]*")),
        "memory": host_memory(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "shm": shm and shm.total,
        "shm_free": shm and shm.free,
        **{k: None if v == resource.RLIM_INFINITY else v for k, v in soft.items()},
    }


def _cores(limit_file: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Return the cores that the affinity and the container's quota allow."""
    there = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path(limit_file).read_text().split()
        return there if quota == "max" else min(there, int(quota) / int(period))
    except (OSError, ValueError):
        return there
