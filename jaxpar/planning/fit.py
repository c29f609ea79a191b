"""Compares the predicted memory of a run with that of its devices, before anything is allocated.

A CPU's devices share the memory of their host. Linux ends a process that takes more, without a
message, and often other programs first.
"""

import jax

from jaxpar.config import Config, ConfigError, flag
from jaxpar.kernels.hopper import capability as elementwise
from jaxpar.kernels.platform import Platform
from jaxpar.model.flops import num_params
from jaxpar.planning.predict.hardware import GIB
from jaxpar.planning.predict.memory import memory_of
from jaxpar.planning.predict.peak import MemoryForecast
from jaxpar.planning.predict.recurrence import with_backend
from jaxpar.runtime.host_memory import host_memory


def check_fits(cfg: Config, processes: int = 1) -> str:
    """Check that a run fits in the memory of this process's devices.

    Args:     cfg: resolved. processes: of the run on this host.
    Returns:  a warning if a GPU's memory is less than predicted; otherwise an empty text.
    Raises:   ConfigError if devices are CPUs and their host has less memory than predicted.
    """
    device, count = jax.local_devices()[0], jax.local_device_count()
    if device.platform == "cpu":
        check_host(cfg, count * processes, host_memory())
        return ""
    there = (device.memory_stats() or {}).get("bytes_limit", 0)
    here = Platform.here()
    by_xla = not elementwise.runs_on(here)
    needed = memory_of(with_backend(cfg, here), softmax_by_xla=by_xla).total
    if not there or needed <= there:
        return ""
    return (
        f"a step is predicted to need {needed / GIB:.1f} GiB, but a device ({device.device_kind}) "
        f"has {there / GIB:.1f} GiB; python -m jaxpar.plan shows layouts that fit"
    )


def check_host(cfg: Config, devices: int, there: int) -> None:
    """Check that simulated devices fit in their host's memory.

    Args:     cfg: resolved. devices: on this host. there: bytes of memory.
    Raises:   ConfigError with the parts of the prediction.
    """
    memory = memory_of(cfg, on_reference=True)
    needed = devices * memory.total
    if needed <= there:
        return
    rule = f"needs {needed / GIB:,.1f} GiB of memory for {_count(devices)} ({_parts(memory)} GiB "
    rule += f"each), but this host or container has {there / GIB:,.1f} GiB"
    fix = "train on GPUs (python -m jaxpar.plan shows how many), or use a smaller model"
    if devices * memory.state <= there / 2:
        fix = "take smaller steps, with a smaller "
        fix += f"{flag('train.global_batch_size')} or {flag('data.seq_len')}, or more "
        fix += flag("parallel.num_microbatches")
    raise ConfigError("model", f"{num_params(cfg.model):,} parameters", rule, fix)


def _count(devices: int) -> str:
    return "1 CPU device" if devices == 1 else f"{devices:,} CPU devices"


def _parts(memory: MemoryForecast) -> str:
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations + memory.buffers,
        "the rest": memory.logits + memory.gathered,
    }
    return ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts.items())
