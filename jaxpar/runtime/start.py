"""Prepare a process before JAX starts: flags, simulated devices, compilation cache, host memory.

Every program calls `start` first.
"""

import contextlib
import os
import re
from pathlib import Path

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.runtime.gpus import visible, xla_flags
from jaxpar.runtime.host_memory import host_memory


def start(cfg: Config, num_processes: int = 1, *, needs_devices: bool = True) -> list[str]:
    """Prepare this process for JAX's backend, which starts at the first use of a device.

    Args:     num_processes: of the run; they connect afterwards (`rendezvous.connect`).
              needs_devices: check that JAX can start the requested platform.
    Returns:  the flags and environment variables that were set, for the log.
    Raises:   ConfigError if it cannot, or if it is too late to simulate devices.
    """
    run = cfg.run
    if (precision := PRECISIONS[cfg.compute.matmul_precision]) is not None:
        jax.config.update("jax_default_matmul_precision", precision)
    if run.cpu_devices:
        _simulate(run.cpu_devices)
        return _without_cache(num_processes)
    if needs_devices:
        _check_platforms(jax.config.jax_platforms or "")
    was_set = xla_flags.apply(cfg, num_processes)
    if run.deterministic and visible.gpu_is_present():
        was_set += xla_flags.make_deterministic()
    if visible.gpu_is_present():
        was_set += _open_host_memory()
        _open_host_devices()
    else:
        was_set += _without_cache(num_processes)
    if run.compilation_cache and visible.gpu_is_present():
        folder = Path(run.compilation_cache).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        was_set.append(f"compilation cache {run.compilation_cache}")
    return was_set


def _without_cache(num_processes: int) -> list[str]:
    """Turn off the compilation cache that the environment asks for, on several CPU devices.

    A CPU program that jaxlib 0.11.2 reads back from the cache has lost the order of collectives in
    different computations: those of a pipeline's branches and of the step around them. Devices then
    sum different arrays, without an error, or XLA crashes. GPU programs keep their order.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return []
    if max(num_processes, jax.config.jax_num_cpu_devices) < 2:
        return []
    jax.config.update("jax_enable_compilation_cache", False)
    return ["no compilation cache: programs of several CPU devices are wrong when read back"]


#: JAX's name of each `compute.matmul_precision`; None leaves JAX's own default.
PRECISIONS = {"default": None, "tf32": "tensorfloat32", "float32": "float32"}

#: Files by which JAX 0.11 detects an NVIDIA GPU; the last one is for WSL.
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def _check_platforms(asked: str) -> None:
    """Raise ConfigError if only CUDA is allowed but there is no GPU: JAX would skip CUDA and fail
    with an assertion without a message."""
    if set(asked.split(",")) == {"cuda"} and not any(map(os.path.exists, NVIDIA_DEVICES)):
        rule = "allows only CUDA, but JAX finds no NVIDIA GPU"
        fix = "unset it, or set it to cpu; python -m jaxpar.doctor shows the devices"
        raise ConfigError("JAX_PLATFORMS", asked, rule, fix)


def of_a_platform(error: BaseException) -> BaseException:
    """Convert the error for a platform in JAX_PLATFORMS that JAX cannot start to a ConfigError."""
    asked = jax.config.jax_platforms
    told = re.match("Unable to initialize backend '(.*?)': (.*)", " ".join(str(error).split()))
    if not (asked and told and isinstance(error, RuntimeError)):
        return error
    name, why = told[1], told[2].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    gpu = "an NVIDIA GPU" if any(map(os.path.exists, NVIDIA_DEVICES)) else "no NVIDIA GPU"
    rule = f"requests {name}, which JAX cannot start ({why}); this host has a CPU and {gpu}"
    fix = "unset it, or set it to cpu; python -m jaxpar.doctor shows the devices"
    return ConfigError("JAX_PLATFORMS", asked, rule, fix)


#: XLA's limit on the pinned host memory of a process, 64 GB unless it is set.
HOST_LIMIT, DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def _open_host_memory() -> list[str]:
    """Allow offloaded and saved arrays to use all of the host's memory. Nothing is reserved.

    The limit is at least XLA's default: a virtual machine may get memory only as it uses it.
    """
    if HOST_LIMIT in os.environ:
        return []
    os.environ[HOST_LIMIT] = str(max(host_memory() >> 30, DEFAULT_LIMIT))
    return [f"{HOST_LIMIT}={os.environ[HOST_LIMIT]}"]


def _open_host_devices() -> None:
    """Give JAX a CPU device for each GPU, for copies in host memory. GPUs stay the default."""
    asked = (jax.config.jax_platforms or "").split(",")
    with contextlib.suppress(RuntimeError):  # JAX is already running: use its devices
        jax.config.update("jax_num_cpu_devices", max(visible.visible_gpus(), 1))
        if asked[0] == "cuda" and "cpu" not in asked:
            jax.config.update("jax_platforms", ",".join([*asked, "cpu"]))


#: Threads of XLA's pool for each simulated device. By default, XLA uses one per device, or one per
#: core if there are more cores. A collective holds a thread while it waits for the other devices.
#: If a device waits in two collectives, no thread may be left for the device that they wait for,
#: and XLA aborts after 40 s (seen with 4 devices on 2 cores). XLA reads the number from NPROC.
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
            rule = f"is too late: JAX has already started with {jax.device_count()} devices"
            raise ConfigError("run.cpu_devices", num_devices, rule, fix) from error
