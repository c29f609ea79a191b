"""Measures how kernels were launched: calls of the host, its lead, and the gaps between kernels.

The host runs ahead of the GPU, so that the next kernel waits in a queue when one ends. A gap in
which nothing runs has one of two causes:

    host late   the GPU had run out of work before the host began to launch the kernel after the
                gap. The time until that call is the host's. The rest is launch latency.
    queued      it was launched before: the gap is what the GPU takes from one kernel to the next.

A call that launches a CUDA graph returns late, when its first kernels may have ended. All times are
therefore from the start of a call.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from jaxpar.tools.profiling.trace.read import HostCall, ProfiledKernel

#: CUDA graphs that a profile names. Branches of experts make a graph for each of their parts.
GRAPHS = 20


@dataclass(frozen=True)
class Gap:
    """Nanoseconds in which nothing ran on a device: those of the host, and the others.

    queued: the kernel after it was launched before the gap began.
    """

    late: int
    rest: int
    queued: bool


def launching(devices: Sequence[Sequence[Sequence[ProfiledKernel]]]) -> dict[str, Any] | None:
    """Return the figures per step, means over devices and steps; None if calls are not known.

    calls, graphs        calls of the host that launch kernels, and those that launch a CUDA graph.
    kernels, in_graphs   all kernels, and those inside CUDA graphs.
    by_graph             calls, kernels and milliseconds of kernels by CUDA graph, of the GRAPHS
                         longest of `distinct_graphs`, by time.
    host_ms              time in these calls, which includes waits for room in the queue.
    ahead_ms             from a call to its first kernel: the least and the median.
    gaps, idle_ms        gaps between kernels of a step, and their sum.
    late_ms, queued_ms   the two parts of it: waits for the host, and all else.
    latency_us           from a call to its kernel, on a GPU that had run out of work: least, median
                         and most; None if it never did.
    between_us           median gap before a queued kernel; None if there is none.
    between_steps_late   share of the time between steps in which the host was late; None for a
                         single step.

    Args:     devices: for each device, its steps of kernels in order of their start.
    """
    steps = [step for steps in devices for step in steps]
    if not any(kernel.call for step in steps for kernel in step):
        return None
    calls = [_calls(step) for step in steps]
    gaps = [list(_gaps(step, -1)) for step in steps]
    flat = [gap for step in gaps for gap in step]
    ahead = [(k.start - call.start) / 1e6 for step in calls for call, k in step.items()]
    latencies = [gap.rest / 1e3 for gap in flat if not gap.queued]
    queued = [gap.rest / 1e3 for gap in flat if gap.queued]
    each, by_graph = len(steps), _by_graph(steps)
    return {
        "calls": sum(map(len, calls)) / each,
        "graphs": sum(call.is_graph for step in calls for call in step) / each,
        "kernels": sum(map(len, steps)) / each,
        "in_graphs": sum(k.call.is_graph for step in steps for k in step if k.call) / each,
        "distinct_graphs": len(by_graph),
        "by_graph": dict(itertools.islice(by_graph.items(), GRAPHS)),
        "host_ms": sum(c.end - c.start for step in calls for c in step) / 1e6 / each,
        "ahead_ms": {"least": min(ahead), "median": median(ahead)},
        "gaps": len(flat) / each,
        "idle_ms": sum(gap.late + gap.rest for gap in flat) / 1e6 / each,
        "late_ms": sum(gap.late for gap in flat) / 1e6 / each,
        "queued_ms": sum(gap.rest for gap in flat) / 1e6 / each,
        "latency_us": _spread(latencies),
        "between_us": median(queued) if queued else None,
        "between_steps_late": _between_steps(devices),
    }


def _by_graph(steps: Sequence[Sequence[ProfiledKernel]]) -> dict[str, dict[str, float]]:
    """Return the figures of each CUDA graph, per step in which it is launched."""
    found: dict[str, list[list[ProfiledKernel]]] = defaultdict(list)
    for step in steps:
        of_step: dict[str, list[ProfiledKernel]] = defaultdict(list)
        for kernel in step:
            if kernel.call is not None and kernel.call.graph:
                of_step[kernel.call.graph].append(kernel)
        for graph, kernels in of_step.items():
            found[graph].append(kernels)
    rows = {
        graph: {
            "calls": fmean(len({kernel.call for kernel in kernels}) for kernels in each),
            "kernels": fmean(map(len, each)),
            "ms": fmean(sum(k.end - k.start for k in kernels) for kernels in each) / 1e6,
        }
        for graph, each in found.items()
    }
    return dict(sorted(rows.items(), key=lambda item: -item[1]["ms"]))


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"least": min(values), "median": median(values), "most": max(values)}


def _calls(step: Sequence[ProfiledKernel]) -> dict[HostCall, ProfiledKernel]:
    """Return the calls of a step, each with the first kernel that it launched."""
    found: dict[HostCall, ProfiledKernel] = {}
    for kernel in step:
        if kernel.call is not None:
            found.setdefault(kernel.call, kernel)
    return found


def _gaps(step: Sequence[ProfiledKernel], ended: int) -> Iterator[Gap]:
    """Yield the gaps between kernels. `ended`: when earlier work ended; -1: no gap at first."""
    for kernel in step:
        if 0 <= ended < kernel.start:
            called = kernel.call.start if kernel.call is not None else 0
            late = max(0, min(called, kernel.start) - ended)
            yield Gap(late, kernel.start - ended - late, queued=not late)
        ended = max(ended, kernel.end)


def _between_steps(devices: Sequence[Sequence[Sequence[ProfiledKernel]]]) -> float | None:
    """Return the share of the time between steps in which the host was late."""
    found = [
        next(_gaps(step[:1], max(k.end for k in before)), Gap(0, 0, queued=True))
        for steps in devices
        for before, step in itertools.pairwise(steps)
    ]
    whole = sum(gap.late + gap.rest for gap in found)
    return sum(gap.late for gap in found) / whole if whole else None
