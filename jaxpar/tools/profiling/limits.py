"""Says what limits each kernel: compute, memory, latency or communication.

By the least time that a kernel's FLOPs and bytes take at the GPU's peaks (`roofline.py`):

    compute         the FLOPs take longer, and at least `NEAR` of the measured time.
    memory          the bytes do.
    latency         neither, and the kernel is too short or has too few blocks to fill the GPU.
    other           neither: instructions, shared memory or stalls. Nsight Compute tells which.
    communication   a collective, or a copy to another GPU or the host.

It is None for a kernel whose FLOPs or bytes are unknown.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxpar.planning.predict.hardware import Gpu
from jaxpar.tools.profiling.trace.kernels import CLASSES, uses_tensor_cores
from jaxpar.tools.profiling.trace.scopes import place_of

COMPUTE, MEMORY, LATENCY, OTHER, LINKS = "compute", "memory", "latency", "other", "communication"

#: Limits in the order in which they are reported.
BOUNDS = (COMPUTE, MEMORY, LATENCY, OTHER, LINKS)

#: Least share of the measured time that FLOPs or bytes must explain. Matmuls of a long run reach
#: 0.65 to 0.7 on an H200 at its power limit, attention 0.45 to 0.55, copies 0.87.
NEAR = 0.4

#: Share of a scope's time that must have a known roofline.
MOST = 0.9

#: Kernels up to this time are short: a launch takes a few microseconds, and so do their blocks.
SHORT_US = 10.0

#: Kernels that fill less than this part of the GPU have few blocks.
FEW_WAVES = 0.5


def with_bounds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each kernel `tensor_cores` (whether it uses them) and `bound`."""
    made = []
    for row in rows:
        uses = uses_tensor_cores(row["name"], row["class"])
        made.append(row | {"tensor_cores": uses, "bound": bound_of(row)})
    return made


def bound_of(row: dict[str, Any]) -> str | None:
    """Return the limit of a kernel with its costs; None if it is unknown."""
    if row["class"] not in CLASSES:
        return LINKS
    compute, memory = row["least_us"] or (None, None)
    share = max(compute or 0.0, memory or 0.0) / row["mean_us"] if row["mean_us"] else 0.0
    if share >= NEAR:
        return COMPUTE if (compute or 0.0) > (memory or 0.0) else MEMORY
    few = row["waves"] is not None and row["waves"] < FEW_WAVES
    if row["mean_us"] <= SHORT_US or few:
        return LATENCY
    return OTHER if compute is not None and memory is not None else None


def summary(rows: Sequence[dict[str, Any]], step_ms: float, gpu: Gpu | None) -> dict[str, Any]:
    """Return the milliseconds of a step by bound, and its use of the tensor cores.

    by_bound_ms          sums over kernels, which may overlap. "unknown": kernels without a bound.
    tensor_ms, _share    time of kernels that use tensor cores, and its share of the step.
    tensor_flops         their FLOPs, as far as they are known; None if one kernel's are not.
    flops_per_second     of these kernels while they run; None if unknown.
    peak_share           their FLOPs over the peak for the whole step; None if unknown.
    """
    by_bound: dict[str, float] = defaultdict(float)
    for row in rows:
        by_bound[row["bound"] or "unknown"] += row["ms"]
    tensor = [row for row in rows if row["tensor_cores"]]
    ms = sum(row["ms"] for row in tensor)
    known = bool(tensor) and all(row["flops"] for row in tensor)
    flops = sum(row["flops"] * row["count"] for row in tensor) if known else None
    return {
        "by_bound_ms": {b: by_bound[b] for b in (*BOUNDS, "unknown") if b in by_bound},
        "tensor_ms": ms,
        "tensor_share": ms / step_ms,
        "tensor_flops": flops,
        "flops_per_second": flops / ms * 1e3 if flops else None,
        "peak_share": flops / (gpu.peak.value * step_ms / 1e3) if flops and gpu else None,
    }


def by_scope(rows: Sequence[dict[str, Any]], step_ms: float) -> list[dict[str, Any]]:
    """Return a row per pass and scope of compute, by time.

    ms, share           time, and its share of the step.
    tensor_share        share of that time in kernels that use tensor cores.
    occupancy           mean theoretical occupancy, weighted by time; None if unknown.
    flops_per_second, bytes_per_second
                        known FLOPs and bytes over the time.
    roofline            least time over measured time; None unless known for `MOST` of the time.
    bound               the limit with most time.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["scope"] and row["bound"] != LINKS and row["ms"]:
            found[place_of(row["scope"])].append(row)
    ordered = sorted(found.items(), key=lambda item: -sum(row["ms"] for row in item[1]))
    return [
        {"pass": place[0], "scope": place[1], **_of_scope(those, step_ms)}
        for place, those in ordered
    ]


def _of_scope(rows: Sequence[dict[str, Any]], step_ms: float) -> dict[str, Any]:
    ms = sum(row["ms"] for row in rows)
    total = lambda name: sum((row[name] or 0) * row["count"] for row in rows)  # noqa: E731
    filled = [row for row in rows if row["occupancy"] is not None]
    measured = [row for row in rows if row["roofline"] is not None]
    bounds: dict[str, float] = defaultdict(float)
    for row in rows:
        bounds[row["bound"] or ""] += row["ms"]
    return {
        "ms": ms,
        "share": ms / step_ms,
        "tensor_share": sum(row["ms"] for row in rows if row["tensor_cores"]) / ms,
        "occupancy": _weighted(filled, "occupancy"),
        "flops_per_second": total("flops") / ms * 1e3,
        "bytes_per_second": total("bytes") / ms * 1e3,
        "roofline": _weighted(measured, "roofline")
        if sum(row["ms"] for row in measured) >= MOST * ms
        else None,
        "bound": max(bounds, key=lambda name: bounds[name]) or None,
    }


def _weighted(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    ms = sum(row["ms"] for row in rows)
    return sum(row[name] * row["ms"] for row in rows) / ms if ms else None
