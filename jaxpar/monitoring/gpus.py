"""Power, clocks, energy, memory and errors of this process's GPUs, read from NVML once a second.

A thread reads, so that no step waits for the driver; records have what it read last.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from jaxpar.config import Config
from jaxpar.runtime.gpus import nvml, visible

#: Milliseconds between two readings; the thread waits for errors of the GPUs meanwhile.
EVERY_MS = 1000


@dataclass(frozen=True)
class Reading:
    """What the GPUs of this process showed at a moment. None: the GPUs do not tell."""

    at: float
    """Seconds, of `time.monotonic`."""
    joules: float | None
    """Since the driver was loaded, summed over the GPUs."""
    watts: float | None
    """Mean over the GPUs."""
    clock_mhz: float | None
    """Clock of the multiprocessors of the slowest GPU."""
    memory_gib: float | None
    """Used by all programs, on the fullest GPU."""
    celsius: float | None
    """Temperature of the hottest GPU."""


class GpuReader:
    """Reads NVML in a thread. Use as a context manager."""

    def __init__(self, ids: Sequence[str], log: Callable[[str], None]):
        """Start NVML.

        Args:     ids: of the GPUs, as in CUDA_VISIBLE_DEVICES: indices or UUIDs. log: called with a
                  line for each error of a GPU.
        Raises:   nvml.Unavailable if there is no driver, or no such GPU.
        """
        self._log = log
        self._lock, self._over = threading.Lock(), threading.Event()
        self._xids = 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(nvml.opened())
            self._handles = [nvml.find(name) for name in ids]
            self._events = self._register()
            self._latest = self._recorded = self._read()
            self._opened = stack.pop_all()
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
        self._thread.start()

    def _register(self) -> Any:
        """Ask for the errors (Xid) of the GPUs. None if they cannot report them."""
        with contextlib.suppress(pynvml.NVMLError):
            events = pynvml.nvmlEventSetCreate()
            for handle in self._handles:
                kind = pynvml.nvmlEventTypeXidCriticalError
                pynvml.nvmlDeviceRegisterEvents(handle, kind, events)
            return events
        return None

    def metrics(self, tokens_per_second: float | None) -> dict[str, float]:
        """Return the metrics of a record.

        Args:     tokens_per_second: of this process's GPUs, since the last record; None if unknown.
        """
        with self._lock:
            now, before, xids = self._latest, self._recorded, self._xids
            self._recorded = now
        watts = _mean_watts(before, now, len(self._handles))
        found = {
            "gpu_watts": watts,
            "gpu_clock_mhz": now.clock_mhz,
            "gpu_memory_gib": now.memory_gib,
            "gpu_celsius": now.celsius,
            "joules_per_token": None,
            "xid_errors": float(xids) if self._events is not None else None,
        }
        if watts is not None and tokens_per_second:
            found["joules_per_token"] = watts * len(self._handles) / tokens_per_second
        return {name: value for name, value in found.items() if value is not None}

    def _read(self) -> Reading:
        joules = self._each(lambda h: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3)
        watts = self._each(lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3)
        clocks = self._each(lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM))
        memory = self._each(lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).used / 2**30)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        heat = self._each(lambda h: pynvml.nvmlDeviceGetTemperature(h, sensor))
        return Reading(
            at=time.monotonic(),
            joules=sum(joules) if joules else None,
            watts=sum(watts) / len(watts) if watts else None,
            clock_mhz=min(clocks, default=None),
            memory_gib=max(memory, default=None),
            celsius=max(heat, default=None),
        )

    def _each(self, of: Callable[[Any], float]) -> list[float]:
        """Read a value of every GPU; none if one of them does not have it."""
        try:
            return [float(of(handle)) for handle in self._handles]
        except pynvml.NVMLError:
            return []

    def _watch(self) -> None:
        while not self._over.is_set():
            self._wait_for_errors()
            reading = self._read()
            with self._lock:
                self._latest = reading

    def _wait_for_errors(self) -> None:
        """Wait for EVERY_MS, or until a GPU reports an error, which is counted and logged."""
        if self._events is None:
            self._over.wait(EVERY_MS / 1e3)
            return
        try:
            event = pynvml.nvmlEventSetWait_v2(self._events, EVERY_MS)
        except pynvml.NVMLError_Timeout:
            return
        except pynvml.NVMLError:
            self._over.wait(EVERY_MS / 1e3)  # a GPU is lost, for example
            return
        with self._lock:
            self._xids += 1
        name = "a GPU"
        with contextlib.suppress(pynvml.NVMLError):  # it may be lost
            name = pynvml.nvmlDeviceGetUUID(event.device)
        self._log(f"WARNING    {name} reports Xid {event.eventData}, an error of GPU or driver")

    def __enter__(self) -> "GpuReader":
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join(2 * EVERY_MS / 1e3)
        with self._opened, contextlib.suppress(pynvml.NVMLError):
            if self._events is not None and not self._thread.is_alive():
                pynvml.nvmlEventSetFree(self._events)


def _mean_watts(before: Reading, now: Reading, count: int) -> float | None:
    """Return the mean power of a GPU between two readings, by their energy; else that of `now`."""
    seconds = now.at - before.at
    if before.joules is None or now.joules is None or seconds < EVERY_MS / 2e3:
        return now.watts
    return (now.joules - before.joules) / seconds / count


def open_gpus(cfg: Config, log: Callable[[str], None]) -> GpuReader | None:
    """Start to read the GPUs of this process; None without any, or with `metrics.gpus` False.

    Args:     log: called with one line if they cannot be read, and for each error of a GPU.
    """
    if not cfg.metrics.gpus or cfg.run.cpu_devices or not visible.gpu_is_present():
        return None
    try:
        return GpuReader(visible.visible_gpu_ids(), log)
    except nvml.Unavailable as error:
        log(f"no power, clocks and errors of GPUs in the metrics: {error}")
        return None
