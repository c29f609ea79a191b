"""Where the time of a step goes: the figures of a trace, as they go on a card.

Of one device in one step, between its first kernel and its last:

    compute         time in which any kernel runs that is not communication
    communication   time in which any collective, or copy to another GPU or host memory, runs
    hidden          both
    exposed         communication without compute
    idle            neither

so step = compute + exposed + idle. Times by class, pass and kernel are sums over kernels, which
count time twice where kernels of several streams overlap.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jaxpar.profiling.hlo import text as hlo
from jaxpar.profiling.hlo.attribution import attribute
from jaxpar.profiling.trace import cpu_trace
from jaxpar.profiling.trace.intervals import Interval, length, subtract, union
from jaxpar.profiling.trace.kernels import CLASSES, COMMUNICATION, COPY, HOST, classify, family
from jaxpar.profiling.trace.read import KernelTrace, NoKernels, ProfiledKernel
from jaxpar.profiling.trace.scopes import place_of, shorten

#: Figures of which the worst device is told too.
WORST = ("exposed", "idle")


@dataclass(frozen=True)
class Sorted:
    """A kernel with its class and, for communication, its kind."""

    kernel: ProfiledKernel
    what: str
    kind: str

    @property
    def ns(self) -> int:
        """How long it ran."""
        return self.kernel.end - self.kernel.start


def sort_kernels(kernels: Sequence[ProfiledKernel]) -> list[Sorted]:
    """Each kernel with what it does."""
    known = lambda k: (k.what, k.kind) if k.what else classify(k.name, k.scope, k.op)  # noqa: E731
    return [Sorted(k, *known(k)) for k in kernels]


def busy_times(kernels: Sequence[Sorted]) -> tuple[list[Interval], list[Interval]]:
    """The time of compute, and that of communication."""
    compute = union(k.kernel.interval for k in kernels if k.what != COMMUNICATION)
    return compute, union(k.kernel.interval for k in kernels if k.what == COMMUNICATION)


def of_step(kernels: Sequence[Sorted]) -> dict[str, int]:
    """The figures of one device in one step, in nanoseconds."""
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
    """Nanoseconds of exposed communication, by kind.

    Where two collectives overlap, the time is the one's that began first: the sum is `exposed`.
    """
    taken, _ = busy_times(kernels)
    found: dict[str, int] = defaultdict(int)
    for item in sorted(kernels, key=lambda k: k.kernel.start):
        if item.what == COMMUNICATION:
            alone = subtract([item.kernel.interval], taken)
            found[item.kind] += length(alone)
            taken = union([*taken, *alone]) if alone else taken
    return dict(found)


def between_steps(steps: Sequence[Sequence[ProfiledKernel]]) -> float | None:
    """Mean nanoseconds from a device's last kernel of a step to its first of the next."""
    if len(steps) < 2:
        return None
    ends = [max(k.end for k in step) for step in steps]
    return fmean(step[0].start - end for end, step in zip(ends, steps[1:], strict=False))


def profile(trace: KernelTrace, hlo_text: str | hlo.Module = "", top: int = 10) -> dict[str, Any]:
    """The figures of a trace, in milliseconds a step: means over devices and steps.

    Args:     hlo_text: `compiled.as_text()` of the module, or what `hlo.parse` made of it; without
        it, kernels inside command buffers have no scope. top: kernels to list, by total time.
    Raises:   NoKernels when no step is whole.
    """
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
        "top_kernels": list(itertools.islice(_top(every), top)),
    }


def _mean_of(figures: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(f[name] for f in figures) for name in figures[0]}


def _by_class(steps: Sequence[Sequence[Sorted]]) -> dict[str, dict[str, float]]:
    """Milliseconds and number of kernels a step, of each class that occurs."""
    found = {}
    for what in CLASSES:
        ns = [k.ns for step in steps for k in step if k.what == what]
        if ns:
            found[what] = {"ms": sum(ns) / 1e6 / len(steps), "count": len(ns) / len(steps)}
    return found


def _by_kind(steps: Sequence[Sequence[Sorted]]) -> dict[str, dict[str, float]]:
    """Milliseconds, exposed milliseconds and number of kernels a step, of each collective."""
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
    """Milliseconds a step of each pass, named scope and class: communication apart, it overlaps."""
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
    """Milliseconds a step of kernels, copies apart, whose scope is not known."""
    copied = lambda k: k.what == COPY or k.kind == HOST  # noqa: E731
    unknown = (k.ns for s in steps for k in s if not k.kernel.scope and not copied(k))
    return sum(unknown) / 1e6 / len(steps)


def _top(steps: Sequence[Sequence[Sorted]]) -> Iterator[dict[str, Any]]:
    """Kernels by total time: those of one name, scope and result shape together."""
    found: dict[tuple, list[Sorted]] = defaultdict(list)
    for item in itertools.chain.from_iterable(steps):
        k = item.kernel
        found[(family(k.name), shorten(k.scope), k.result)].append(item)
    for (name, scope, result), items in sorted(
        found.items(), key=lambda entry: -sum(k.ns for k in entry[1])
    ):
        yield {
            "name": name,
            "class": items[0].kind or items[0].what,
            "count": len(items) / len(steps),
            "mean_us": fmean(k.ns for k in items) / 1e3,
            "ms": sum(k.ns for k in items) / 1e6 / len(steps),
            "scope": scope,
            "op": items[0].kernel.op,
            "result": result,
        }
