"""Before JAX starts: flags, simulated devices, compilation cache. Each program calls it first.

And what a compiled program asks of a host: memory, and its first run to itself.
"""

import os
import re
from pathlib import Path

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.runtime.gpus import visible, xla_flags


def start(cfg: Config, num_processes: int = 1, *, needs_devices: bool = True) -> list[str]:
    """Prepare this process for JAX's backend, which starts at the first use of a device.

    Args:     num_processes: of the run; they meet afterwards (`rendezvous.connect`).
              needs_devices: refuse here what JAX could not start with.
    Returns:  the flags and environment that were set, for the log.
    Raises:   ConfigError where that is so, or devices cannot be simulated any more.
    """
    run = cfg.run
    if run.cpu_devices:
        _simulate(run.cpu_devices)
        return []
    if needs_devices:
        _check_platforms(jax.config.jax_platforms or "")
    was_set = xla_flags.apply(cfg, num_processes)
    if visible.gpu_is_present():
        was_set += _open_host_memory()
    if run.compilation_cache and visible.gpu_is_present():
        folder = Path(run.compilation_cache).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        was_set.append(f"compilation cache {run.compilation_cache}")
    return was_set


#: Files by which JAX 0.11 sees an NVIDIA GPU; the last is that of Windows' Linux.
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def _check_platforms(asked: str) -> None:
    """Raises:   ConfigError for CUDA alone where no GPU is in sight: JAX passes CUDA over there,
    and has an assertion and no words for what is left."""
    if set(asked.split(",")) == {"cuda"} and not any(map(os.path.exists, NVIDIA_DEVICES)):
        rule = "allows CUDA alone, and JAX sees no NVIDIA GPU here"
        fix = "unset it, or set it to cpu; python -m jaxpar.doctor says what is here"
        raise ConfigError("JAX_PLATFORMS", asked, rule, fix)


def of_a_platform(error: BaseException) -> BaseException:
    """An error; where it is that JAX cannot start one of JAX_PLATFORMS, as a ConfigError."""
    asked = jax.config.jax_platforms
    told = re.match("Unable to initialize backend '(.*?)': (.*)", " ".join(str(error).split()))
    if not (asked and told and isinstance(error, RuntimeError)):
        return error
    name, why = told[1], told[2].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    gpu = "an NVIDIA GPU" if any(map(os.path.exists, NVIDIA_DEVICES)) else "no NVIDIA GPU"
    rule = f"asks for {name}, which JAX cannot start ({why}); here are a CPU and {gpu}"
    fix = "unset it, or set it to cpu; python -m jaxpar.doctor says what is here"
    return ConfigError("JAX_PLATFORMS", asked, rule, fix)


#: XLA's limit on the pinned host memory of a process, 64 GB unless it is set.
HOST_LIMIT, DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def _open_host_memory() -> list[str]:
    """Let what is offloaded, or being saved, take this host's memory. Nothing is reserved.

    Never less than by default: a virtual machine may get its memory only as it uses it.
    """
    if HOST_LIMIT in os.environ:
        return []
    os.environ[HOST_LIMIT] = str(max(host_memory() >> 30, DEFAULT_LIMIT))
    return [f"{HOST_LIMIT}={os.environ[HOST_LIMIT]}"]


def host_memory(limit_file: str = "/sys/fs/cgroup/memory.max") -> int:
    """Bytes of memory that this host, or the container, may use."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path(limit_file).read_text().strip() if Path(limit_file).is_file() else "max"
    return there if limit == "max" else min(there, int(limit))


#: Threads of XLA's pool for each simulated device. By itself it takes one, or the host's cores if
#: they are more; a collective holds one while it waits for the other devices, and where a device
#: waits in two at a time, none may be left for the device that they wait for: XLA then aborts after
#: 40 s. (Seen with 4 devices on 2 cores.) XLA reads the number from the variable NPROC.
THREADS_PER_DEVICE = 4


def _simulate(num_devices: int) -> None:
    threads = max(THREADS_PER_DEVICE * num_devices, os.cpu_count() or 1)
    os.environ.setdefault("NPROC", str(threads))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        if jax.device_count() != num_devices or jax.default_backend() != "cpu":
            fix = "use --run.cpu-devices 0, or start a new process"
            rule = f"comes too late: JAX has started with {jax.device_count()} devices"
            raise ConfigError("run.cpu_devices", num_devices, rule, fix) from error
