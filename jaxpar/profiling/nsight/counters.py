"""Reads and explains the counters that Nsight Compute measures, from `ncu --csv --page raw`.

The output has a row of metrics, a row of their units and a row per kernel, after lines of ncu and
of the program. Names of metrics differ between GPUs; those that are missing are not shown.

Source:   Nsight Compute Documentation, "Metrics Reference" and "Speed Of Light".
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.profiling.table import align_columns, digits

#: Sections of ncu's that have the metrics below.
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy"),
    *("LaunchStats", "WarpStateStats"),
)

#: Metrics that no section has on every GPU.
METRICS = (
    "dram__bytes.sum.per_second",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
)

#: A unit that is busy for less of the time does not limit a kernel (NVIDIA's rule).
BUSY = 60.0

#: Longest name to show: those of C++ templates have thousands of characters.
MAX_NAME_CHARS = 110

_UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
_UNITS |= {"second": 1e6, "s": 1e6}
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
_TENSOR = re.compile(r"sm__pipe_tensor(_op_\w+)?_cycles_active\.avg\.pct_of_peak_sustained_elapsed")


class NotCounters(ValueError):
    """Raised for a text that is not the output of `ncu --csv --page raw`."""


@dataclass(frozen=True)
class KernelCounters:
    """A measured kernel: its name, grid, block, and metrics as (value, unit)."""

    name: str
    grid: str
    block: str
    metrics: dict[str, tuple[float, str]]

    def value(self, *names: str) -> float | None:
        """Return the first of these metrics that was measured."""
        return next((self.metrics[name][0] for name in names if name in self.metrics), None)

    @property
    def microseconds(self) -> float | None:
        """Duration."""
        value, unit = self.metrics.get("gpu__time_duration.sum", (0.0, ""))
        return value * _UNITS[unit] if unit in _UNITS else None

    @property
    def tensor_pipe(self) -> float | None:
        """Percent of the time in which the tensor cores are busy."""
        found = [value for name, (value, _) in self.metrics.items() if _TENSOR.fullmatch(name)]
        return max(found, default=None)

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes read and written in device memory."""
        value, unit = self.metrics.get("dram__bytes.sum.per_second", (0.0, ""))
        scale = _BYTES.get(unit.partition("/")[0])
        return value * scale if scale else None

    @property
    def sm(self) -> float | None:
        """Percent of the peak of the multiprocessors' busiest unit."""
        return self.value("sm__throughput.avg.pct_of_peak_sustained_elapsed")

    @property
    def dram(self) -> float | None:
        """Percent of the peak of device memory."""
        return self.value(
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        )

    @property
    def memory(self) -> float | None:
        """Percent of the peak of the busiest of device memory, caches and shared memory."""
        return self.value("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed")

    @property
    def stalls(self) -> dict[str, float]:
        """Reasons for which warps wait, as shares of the waits, largest first."""
        found = {
            name[1]: value
            for text, (value, _) in self.metrics.items()
            if (name := _STALL.fullmatch(text)) and name[1] != "selected"
        }
        whole = sum(found.values()) or 1.0
        return {n: v / whole for n, v in sorted(found.items(), key=lambda item: -item[1]) if v > 0}


def parse(text: str) -> list[KernelCounters]:
    """Parse the output of `ncu --csv --page raw`.

    Raises:   NotCounters if it has no table of kernels.
    """
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith('"ID",')]
    if not starts:
        raise NotCounters('no line begins with "ID",')
    table = list(csv.reader(line for line in lines[starts[0] :] if line.startswith('"')))
    head, units = table[0], table[1] if len(table) > 1 else []
    if len(units) != len(head) or (units and units[0]):
        raise NotCounters("the row of units is missing")
    rows = [dict(zip(head, row, strict=True)) for row in table[2:] if len(row) == len(head)]
    unit_of = dict(zip(head, units, strict=True))
    return [
        KernelCounters(
            row.get("Kernel Name", ""),
            row.get("Grid Size", ""),
            row.get("Block Size", ""),
            {n: (v, unit_of[n]) for n, cell in row.items() if (v := _number(cell)) is not None},
        )
        for row in rows
    ]


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def bound_of(kernel: KernelCounters) -> str:
    """Return what limits a kernel, in words."""
    sm, memory, dram = kernel.sm, kernel.memory, kernel.dram
    if sm is None or memory is None:
        return "unknown: the speed of light was not measured"
    if max(sm, memory) < BUSY:
        return f"latency: no unit is busy for {BUSY:.0f}% of the time; see the waits"
    if sm >= memory:
        return "compute: the multiprocessors are the busiest"
    if dram is not None and dram >= BUSY:
        return "memory: device memory is the busiest"
    return "memory: a cache or shared memory is the busiest, not device memory"


def in_words(kernels: Sequence[KernelCounters]) -> str:
    """Format kernels, one after another."""
    return "\n\n".join(map(_one, kernels))


def _one(k: KernelCounters) -> str:
    percent = lambda value: None if value is None else f"{value:.1f}%"  # noqa: E731
    rows = [
        ("limit", bound_of(k)),
        ("time", None if k.microseconds is None else f"{k.microseconds:,.1f} us"),
        ("tensor cores", percent(k.tensor_pipe)),
        ("multiprocessors", percent(k.sm)),
        ("device memory", _of_memory(k)),
        ("L2 cache", percent(k.value("lts__throughput.avg.pct_of_peak_sustained_elapsed"))),
        ("L1, shared", percent(k.value("l1tex__throughput.avg.pct_of_peak_sustained_elapsed"))),
        ("occupancy", _occupancy(k)),
        ("launch", _launch(k)),
        ("waits", "   ".join(f"{n} {v:.0%}" for n, v in [*k.stalls.items()][:5]) or None),
    ]
    table = align_columns([(name, text) for name, text in rows if text], left=(0, 1))
    name = k.name if len(k.name) <= MAX_NAME_CHARS else k.name[: MAX_NAME_CHARS - 3] + "..."
    return f"{name}\n{table}"


def _of_memory(k: KernelCounters) -> str | None:
    rate = f", {digits(k.bytes_per_second / 1e9)} GB/s" if k.bytes_per_second else ""
    return None if k.dram is None else f"{k.dram:.1f}%{rate}"


def _occupancy(k: KernelCounters) -> str | None:
    measured = k.value("sm__warps_active.avg.pct_of_peak_sustained_active")
    possible = k.value("sm__maximum_warps_per_active_cycle_pct")
    if measured is None:
        return None
    return f"{measured:.1f}%" + (f" of {possible:.1f}% possible" if possible is not None else "")


def _launch(k: KernelCounters) -> str:
    parts = [f"grid {k.grid}", f"block {k.block}"]
    if (registers := k.value("launch__registers_per_thread")) is not None:
        parts.append(f"{registers:.0f} registers")
    if (filled := k.value("launch__waves_per_multiprocessor")) is not None:
        parts.append(f"{digits(filled)} waves")
    return ", ".join(parts)
