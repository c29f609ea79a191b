"""Breaks a step's time down into compute, communication and idle time, from a trace.

For one device in one step, between its first kernel and its last:

    compute         time during which a kernel other than communication runs
    communication   time during which a collective or a copy to another GPU or the host runs
    hidden          both at the same time
    exposed         communication without compute
    idle            neither

so step = compute + exposed + idle. Times by class, pass and kernel are sums over kernels. They
count time twice if kernels on several streams overlap.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from jaxpar.monitoring import hlo
from jaxpar.tools.profiling.attribution import attribute
from jaxpar.tools.profiling.launching import launching
from jaxpar.tools.profiling.trace import cpu_trace
from jaxpar.tools.profiling.trace.kernels import (
    CLASSES,
    COMMUNICATION,
    COPY,
    HOST,
    classify,
    family,
    place_of,
    shorten,
    uses_tensor_cores,
)
from jaxpar.tools.profiling.trace.read import Chip, KernelTrace, NoKernels, ProfiledKernel, waves

# -------------- Arithmetic on time intervals: sorted, disjoint lists of (start, end) in nanoseconds


type Interval = tuple[int, int]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, which may overlap and be unsorted."""
    joined: list[Interval] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(pieces: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time in `pieces` but not in `others`; both are results of `union`."""
    left: list[Interval] = []
    first = 0
    for start, end in pieces:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(pieces: Iterable[Interval]) -> int:
    """Return the total duration in nanoseconds."""
    return sum(end - start for start, end in pieces)


class Cover:
    """Intervals, the result of `union`, that many others are compared with: O(log n) for each."""

    def __init__(self, pieces: Sequence[Interval]):
        self._starts = [start for start, _ in pieces]
        self._ends = [end for _, end in pieces]
        self._before = [0, *accumulate(end - start for start, end in pieces)]

    def outside(self, start: int, end: int) -> int:
        """Return the time between `start` and `end` that is in none of the intervals."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return end - start
        inside = self._before[last] - self._before[first]
        inside -= max(start - self._starts[first], 0) + max(self._ends[last - 1] - end, 0)
        return end - start - inside


#: Figures that are also reported for the worst device.
WORST = ("exposed", "idle")


@dataclass(frozen=True)
class Sorted:
    """A kernel with its class and, for communication, its kind."""

    kernel: ProfiledKernel
    what: str
    kind: str

    @property
    def ns(self) -> int:
        """Duration in nanoseconds."""
        return self.kernel.end - self.kernel.start


def sort_kernels(kernels: Sequence[ProfiledKernel]) -> list[Sorted]:
    """Classify each kernel."""
    known = lambda k: (k.what, k.kind) if k.what else classify(k.name, k.scope, k.op)  # noqa: E731
    return [Sorted(k, *known(k)) for k in kernels]


def busy_times(kernels: Sequence[Sorted]) -> tuple[list[Interval], list[Interval]]:
    """Return the intervals of compute and of communication."""
    compute = union(k.kernel.interval for k in kernels if k.what != COMMUNICATION)
    return compute, union(k.kernel.interval for k in kernels if k.what == COMMUNICATION)


def of_step(kernels: Sequence[Sorted]) -> dict[str, int]:
    """Return the figures of one device in one step, in nanoseconds."""
    compute, communication = busy_times(kernels)
    exposed = length(subtract(communication, compute))
    begin = min(k.kernel.start for k in kernels)
    span = max(k.kernel.end for k in kernels) - begin
    return {
        "step": span,
        "compute": length(compute),
        "communication": length(communication),
        "hidden": length(communication) - exposed,
        "exposed": exposed,
        "idle": span - length(compute) - exposed,
    }


def exposed_by_kind(kernels: Sequence[Sorted]) -> dict[str, int]:
    """Return nanoseconds of exposed communication by kind.

    If two collectives overlap, the time counts for the one that began first, so that the sum is
    `exposed`.
    """
    compute = Cover(union(k.kernel.interval for k in kernels if k.what != COMMUNICATION))
    found: dict[str, int] = defaultdict(int)
    reached = 0  # by an earlier collective: those begin no later, so they take all time up to here
    for item in sorted(kernels, key=lambda k: k.kernel.start):
        if item.what == COMMUNICATION:
            start, end = max(item.kernel.start, reached), item.kernel.end
            found[item.kind] += compute.outside(start, end) if start < end else 0
            reached = max(reached, end)
    return dict(found)


def between_steps(steps: Sequence[Sequence[ProfiledKernel]]) -> float | None:
    """Return the mean nanoseconds between the last kernel of a step and the first of the next."""
    if len(steps) < 2:
        return None
    ends = [max(k.end for k in step) for step in steps]
    return fmean(step[0].start - end for end, step in zip(ends, steps[1:], strict=False))


def profile(
    trace: KernelTrace,
    hlo_text: str | hlo.Module = "",
    top: int = 10,
) -> dict[str, Any]:
    """Return the figures of a trace, in milliseconds per step: means over devices and steps.

    Args:     hlo_text: `compiled.as_text()` of the module, or the result of `hlo.parse`; without
        it, kernels inside command buffers have no scope. top: kernels to list, by total time.
    Raises:   NoKernels if no step is complete.
    """
    module = None
    if hlo_text:
        module = hlo.parse(hlo_text) if isinstance(hlo_text, str) else hlo_text
        trace = attribute(trace, module)
        trace = trace if trace.on_gpu else cpu_trace.classify_instructions(trace, module)
    devices = {n: [sort_kernels(s) for s in steps] for n, steps in trace.devices.items()}
    counts = {len(steps) for steps in devices.values()}
    if counts in (set(), {0}):
        raise NoKernels(f"no step of {trace.module} in the trace")
    each = {n: _mean_of([of_step(s) for s in steps]) for n, steps in devices.items() if steps}
    every = [step for steps in devices.values() for step in steps]
    gaps = [gap for steps in trace.devices.values() if (gap := between_steps(steps)) is not None]
    mean = _mean_of(list(each.values()))
    if not mean["step"]:
        raise NoKernels(f"the kernels of {trace.module} in the trace take no time")
    rows = kernel_rows(every, trace.chip)
    return {
        "module": trace.module,
        "devices": len(each),
        "steps": max(counts),
        "ms": {name: value / 1e6 for name, value in mean.items()},
        "worst_device_ms": {name: max(e[name] for e in each.values()) / 1e6 for name in WORST},
        "devices_ms": {str(n): {k: v / 1e6 for k, v in e.items()} for n, e in each.items()},
        "between_steps_ms": fmean(gaps) / 1e6 if gaps else None,
        "exposed_share": mean["exposed"] / mean["step"],
        "by_class": _by_class(every),
        "communication": _by_kind(every),
        "by_scope_ms": _by_scope(every),
        "unattributed_ms": _unattributed(every),
        "tensor_ms": sum(row["ms"] for row in rows if row["tensor_cores"])
        if trace.on_gpu
        else None,
        "top_kernels": rows[:top],
        "launching": launching(list(trace.devices.values())) if trace.on_gpu else None,
    }


def _mean_of(figures: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(f[name] for f in figures) for name in figures[0]}


def _by_class(steps: Sequence[Sequence[Sorted]]) -> dict[str, dict[str, float]]:
    """Return milliseconds and number of kernels per step, for each class that occurs."""
    found = {}
    for what in CLASSES:
        ns = [k.ns for step in steps for k in step if k.what == what]
        if ns:
            found[what] = {"ms": sum(ns) / 1e6 / len(steps), "count": len(ns) / len(steps)}
    return found


def _by_kind(steps: Sequence[Sequence[Sorted]]) -> dict[str, dict[str, float]]:
    """Return milliseconds, exposed milliseconds and kernels per step, for each collective."""
    found: dict[str, dict[str, float]] = {}
    for step in steps:
        exposed = exposed_by_kind(step)
        for kernel in step:
            if kernel.what == COMMUNICATION:
                row = found.setdefault(kernel.kind, {"ms": 0.0, "exposed_ms": 0.0, "count": 0.0})
                row["ms"] += kernel.ns / 1e6 / len(steps)
                row["count"] += 1 / len(steps)
        for kind, ns in exposed.items():
            found[kind]["exposed_ms"] += ns / 1e6 / len(steps)
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def _by_scope(steps: Sequence[Sequence[Sorted]]) -> list[dict[str, Any]]:
    """Return milliseconds per step for each pass, named scope and class."""
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for kernel in itertools.chain.from_iterable(steps):
        if kernel.kernel.scope:
            place = place_of(kernel.kernel.scope)
            found[(*place, kernel.what)] += kernel.ns / 1e6 / len(steps)
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [
        {"pass": phase, "scope": scope, "class": what, "ms": ms}
        for (phase, scope, what), ms in ordered
    ]


def _unattributed(steps: Sequence[Sequence[Sorted]]) -> float:
    """Return milliseconds per step of kernels with unknown scope, except copies."""
    copied = lambda k: k.what == COPY or k.kind == HOST  # noqa: E731
    unknown = (k.ns for s in steps for k in s if not k.kernel.scope and not copied(k))
    return sum(unknown) / 1e6 / len(steps)


def kernel_rows(
    steps: Sequence[Sequence[Sorted]], chip: Chip | None = None
) -> list[dict[str, Any]]:
    """Return kernels by total time, grouped by name, scope and result shape.

    op                 an HLO instruction of the group.
    tensor_cores       whether kernels of this name use them.
    occupancy, waves   theoretical occupancy, and how often the blocks fill the GPU
                       (`trace/launches.py`): means, or None if unknown.
    """
    found: dict[tuple, list[Sorted]] = defaultdict(list)
    for item in itertools.chain.from_iterable(steps):
        k = item.kernel
        found[(family(k.name), shorten(k.scope), k.result)].append(item)
    ordered = sorted(found.items(), key=lambda entry: -sum(k.ns for k in entry[1]))
    return [
        {
            "name": name,
            "class": items[0].kind or items[0].what,
            "count": len(items) / len(steps),
            "mean_us": fmean(k.ns for k in items) / 1e3,
            "ms": sum(k.ns for k in items) / 1e6 / len(steps),
            "scope": scope,
            "op": items[0].kernel.op,
            "tensor_cores": uses_tensor_cores(name, items[0].what),
            "result": result,
            **_filling(items, chip),
        }
        for (name, scope, result), items in ordered
    ]


def _filling(items: Sequence[Sorted], chip: Chip | None) -> dict[str, float | None]:
    """Return the means of occupancy and waves of kernels."""
    shapes = [item.kernel.shape for item in items if item.kernel.shape is not None]
    occupancy = [shape.occupancy for shape in shapes if shape.occupancy is not None]
    full = [n for shape in shapes if chip and (n := waves(shape, chip)) is not None]
    return {
        "occupancy": fmean(occupancy) if occupancy else None,
        "waves": fmean(full) if full else None,
    }
