"""A compiled step: its memory requirements and its first run."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.runtime.start import DEFAULT_LIMIT, HOST_LIMIT
from jaxpar.step.state import TrainState, bytes_per_device


def check_host_memory(program: Any, cfg: Config, any_process: Callable[[bool], bool]) -> None:
    """Check that a compiled step fits in the host memory that XLA may use.

    A step that does not fit would fail in its first run.

    Args:     any_process: returns whether its argument is True in any process. A collective: all
              processes call it.
    Raises:   ConfigError in all processes, if the step does not fit in one of them.
    """
    memory, devices = program.memory_analysis(), jax.local_device_count()
    values = memory.host_temp_size_in_bytes if memory else 0
    moments = memory.host_argument_size_in_bytes if memory else 0
    needed, limit = devices * (values + moments), int(os.environ.get(HOST_LIMIT, DEFAULT_LIMIT))
    if not any_process(needed > limit << 30):
        return
    rule = f"needs {needed / 2**30:.1f} GiB of host memory for {devices} devices, but XLA may use "
    rule += f"only {limit} GiB here ({HOST_LIMIT})"
    if values >= moments:
        fix = f"name fewer values with :host, or increase {HOST_LIMIT}"
        raise ConfigError("parallel.remat", cfg.parallel.remat, rule, fix)
    fix = f"use --optimizer.offload False, or increase {HOST_LIMIT}"
    raise ConfigError("optimizer.offload", cfg.optimizer.offload, rule, fix)


class FirstRunAlone:
    """A compiled program whose first run does not overlap other work on the devices.

    cuDNN captures its kernels in the first run, and a concurrent transfer can make the capture fail
    (docs/experiments.md#cudnn-graph-capture). Later runs are dispatched asynchronously.
    """

    def __init__(
        self, program: Any, alone: Callable[[], AbstractContextManager[None]] = nullcontext
    ):
        """Args:     alone: returns a context in which no other thread uses the devices."""
        self.program, self.alone, self.has_run = program, alone, False

    def __call__(self, *args: Any) -> Any:
        if self.has_run:
            return self.program(*args)
        self.has_run = True
        with self.alone():
            return jax.block_until_ready(self.program(*jax.block_until_ready(args)))


def memory_of(program: Any, state: TrainState) -> str:
    """Describe the memory that a compiled step needs in addition to the state, for the log.

    Empty if the compiler gives no memory analysis. If the step cannot reuse all of the state's
    memory for the new state, the text includes a warning.
    """
    memory = program.memory_analysis()
    if memory is None:
        return ""
    text = f", {memory.temp_size_in_bytes / 2**30:.1f} GiB temporary"
    if memory.host_temp_size_in_bytes:
        text += f", {memory.host_temp_size_in_bytes / 2**30:.1f} GiB in host memory"
    twice = bytes_per_device(state) - memory.alias_size_in_bytes - memory.host_alias_size_in_bytes
    if twice > 0:
        text += f"\nWARNING    the step keeps two copies of {twice / 2**30:.3f} GiB of the state"
    return text
