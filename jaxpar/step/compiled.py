"""A compiled step: what it needs in memory, and its first run."""

import os
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.runtime.start import DEFAULT_LIMIT, HOST_LIMIT
from jaxpar.step.state import TrainState, bytes_per_device


def check_host_memory(program: Any, cfg: Config, any_process: Callable[[bool], bool]) -> None:
    """That a compiled step holds no more on a host than XLA may take: its first run would end.

    Args:     in_any: whether what is True here or there is so in some process; all call it.
    Raises:   ConfigError in all processes.
    """
    memory, devices = program.memory_analysis(), jax.local_device_count()
    values = memory.host_temp_size_in_bytes if memory else 0
    moments = memory.host_argument_size_in_bytes if memory else 0
    needed, limit = devices * (values + moments), int(os.environ.get(HOST_LIMIT, DEFAULT_LIMIT))
    if not any_process(needed > limit << 30):
        return
    rule = f"leaves {needed / 2**30:.1f} GiB in the memory of a host for {devices} devices, of "
    rule += f"which XLA may take {limit} here ({HOST_LIMIT})"
    if values >= moments:
        fix = "name fewer values with :host, or raise that variable"
        raise ConfigError("parallel.remat", cfg.parallel.remat, rule, fix)
    fix = "use --optimizer.offload False, or raise that variable"
    raise ConfigError("optimizer.offload", cfg.optimizer.offload, rule, fix)


class FirstRunAlone:
    """A compiled program whose first run has the devices to itself.

    cuDNN captures its kernels then, which a transfer under way, or beginning, can make fail
    (docs/experiments/attention.md#cudnn-graph-capture). Later runs are dispatched as ever.
    """

    def __init__(self, program: Any):
        self.program, self.has_run = program, False

    def __call__(self, *args: Any) -> Any:
        if self.has_run:
            return self.program(*args)
        self.has_run = True
        return jax.block_until_ready(self.program(*jax.block_until_ready(args)))


def memory_of(program: Any, state: TrainState) -> str:
    """What a compiled step needs beside the state, for the log; where the compiler says so.

    The state itself is there once if the step takes over all of it; a warning says if not.
    """
    memory = program.memory_analysis()
    if memory is None:
        return ""
    text = f", {memory.temp_size_in_bytes / 2**30:.1f} GiB temporary"
    if memory.host_temp_size_in_bytes:
        text += f", {memory.host_temp_size_in_bytes / 2**30:.1f} GiB in host memory"
    twice = bytes_per_device(state) - memory.alias_size_in_bytes - memory.host_alias_size_in_bytes
    if twice > 0:
        text += f"\nWARNING    the step holds {twice / 2**30:.3f} GiB of the state twice"
    return text
