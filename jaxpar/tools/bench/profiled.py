"""Profiles steps of a benchmark, and adds the breakdown to the card."""

import contextlib
import ctypes
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import ConfigError
from jaxpar.monitoring import hlo
from jaxpar.monitoring.profile_folder import ProfileFacts, write_facts
from jaxpar.monitoring.profiler import capture
from jaxpar.sharding.batch import Batch
from jaxpar.step.state import TrainState
from jaxpar.tools.profiling import breakdown, table
from jaxpar.tools.profiling.trace import read as trace

#: Profiled steps that are discarded first: after a pause, a GPU exceeds its power limit for about
#: 0.1 s, and then stays well below it until its clock has settled.
SETTLE = 3

#: Who measures: JAX's profiler, or a tool of NVIDIA's that runs this program.
JAX, NVIDIA = "jax", "nvidia"


@dataclass
class StartedRun:
    """A run in progress: its compiled step, HLO text, state and the next batches.

    facts: the facts of a trace of this number of further steps; None if unknown.
    """

    step: Callable[[TrainState, Batch], tuple[TrainState, Any]]
    hlo_text: str
    state: TrainState
    batches: Generator[tuple[int, Batch]]
    facts: Callable[[int], ProfileFacts] | None = None


def profile_steps(
    running: StartedRun, steps: int, keep: str | None = None, profiler: str = JAX
) -> dict[str, Any]:
    """Run more steps under the profiler, and close the loader.

    All processes run the steps. Process 0 traces its own devices.

    Args:     keep: folder for the trace; None: the trace is deleted. profiler: NVIDIA only marks
              the steps, for the tool that runs this program.
    Returns:  `profile`, from `breakdown.profile`; or None and `profile_missing`, the reason.
    """
    with contextlib.closing(running.batches):
        if not steps:
            return _missing("not requested: --profile-steps 0")
        jax.block_until_ready(running.state)
        if profiler == NVIDIA:
            return _marked(running, steps)
        if jax.process_index() != 0:
            _take(running, SETTLE + steps)
            return _missing("process 0 has it")
        return _traced(running, steps, keep)


def check_profiler(profiler: str, keep: str | None) -> None:
    """Check the options of the profiler, once the devices are known.

    Raises:   ConfigError if NVIDIA's tools cannot measure this program, or would not keep a trace.
    """
    if profiler == NVIDIA and jax.default_backend() != "gpu":
        raise ConfigError("--profiler", profiler, "needs an NVIDIA GPU", f"use --profiler {JAX}")
    if profiler == NVIDIA and keep is not None:
        rule = f"keeps JAX's trace, which --profiler {NVIDIA} does not take"
        raise ConfigError("--trace", keep, rule, f"remove it, or use --profiler {JAX}")


def _marked(running: StartedRun, steps: int) -> dict[str, Any]:
    with marked_for_nvidia(jax.local_devices()[0].local_hardware_id or 0):
        _take(running, steps)
    return _missing(f"--profiler {NVIDIA}: the tool that runs this program has it")


def _take(running: StartedRun, steps: int) -> None:
    for _, (_, batch) in zip(range(steps), running.batches, strict=False):
        running.state, measured = running.step(running.state, batch)
    jax.block_until_ready((running.state, measured))


def _traced(running: StartedRun, steps: int, keep: str | None) -> dict[str, Any]:
    """Profile the steps. A failure of the profiler or the disk does not end the benchmark."""
    begun = taken = False
    try:
        with _folder(keep) as folder:
            with capture(folder):
                begun = True
                _take(running, SETTLE + steps)
                taken = True
            found = trace.read(trace.newest_file(folder), hlo.module_name(running.hlo_text))
            found = found.without_first(SETTLE)
            facts = running.facts(SETTLE + steps) if running.facts is not None else None
            if facts is not None and keep is not None:
                write_facts(Path(keep), facts)
            return {"profile": breakdown.profile(found, running.hlo_text, 10)}
    except (OSError, RuntimeError, ValueError) as error:
        if begun and not taken:
            raise  # a step failed
        if not begun:
            _take(running, SETTLE + steps)  # the other processes run them too
        known = isinstance(error, ValueError)
        return _missing(str(error) if known else f"the trace failed: {error}")


def in_words(card: dict[str, Any]) -> str:
    """Format the profile as tables, or the reason why there is none."""
    if card["profile"] is None:
        return f"no profile: {card['profile_missing']}"
    return "\n" + table.table(card["profile"], card["collective_bytes"])


def sent_in_words(card: dict[str, Any]) -> str:
    """Describe what a device sends in a step."""
    sent = card["collective_bytes"]
    if sent is None:
        return f"bytes sent unknown: {card['collective_bytes_missing']}"
    kinds = [f"{row['count']} {kind}" for kind, row in sent["kinds"].items()]
    least = "at least " if sent["unknown"] else ""
    what = f" ({', '.join(kinds)})" if kinds else ""
    return f"sends {least}{sent['bytes'] / 1e9:,.3f} GB per step{what}"


def _missing(why: str) -> dict[str, Any]:
    return {"profile": None, "profile_missing": why}


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        yield Path(folder)


# ---------- Marks the steps that NVIDIA's profilers measure: from cuProfilerStart to cuProfilerStop
#
#     ncu  --profile-from-start off ...
#     nsys profile --capture-range=cudaProfilerApi ...
#
# measure only what runs in between. Without such a tool, the marks have no effect.
#
# Source:   CUDA Driver API, "Profiler Control".


#: NVIDIA's driver, which every process with a GPU has loaded.
_LIBRARY = "libcuda.so.1"


@contextlib.contextmanager
def marked_for_nvidia(device: int = 0) -> Iterator[None]:
    """Mark what runs in this context. The caller waits for the GPU at both ends.

    Args:     device: number of a GPU of this process, whose primary context (which JAX uses) tells
              the driver of the marks. They hold for all GPUs of the process.
    Raises:   OSError without NVIDIA's driver. RuntimeError if the driver refuses.
    """
    driver = ctypes.CDLL(_LIBRARY)
    context = ctypes.c_void_p()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(driver, "cuCtxPushCurrent_v2", context)
    _call(driver, "cuProfilerStart")
    try:
        yield
    finally:
        _call(driver, "cuProfilerStop")
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
        _call(driver, "cuDevicePrimaryCtxRelease_v2", device)


def _call(driver: ctypes.CDLL, name: str, *args: object) -> None:
    code = getattr(driver, name)(*args)
    if code:
        raise RuntimeError(f"{name} returned CUDA error {code}")
