"""Adds FLOPs, bytes and shares of a GPU's peaks to the kernels of a profile."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpar.monitoring.hlo.text import Module
from jaxpar.planning.predict.hardware import Gpu
from jaxpar.tools.profiling.hlo.costs import InstructionCost, cost_of, multiplications
from jaxpar.tools.profiling.trace.kernels import ATTENTION, CLASSES, is_around, uses_tensor_cores
from jaxpar.tools.profiling.trace.scopes import BACKWARD, FORWARD, RECOMPUTE, place_of

#: Shares of attention's 14 H K FLOPs per pair of a query and a key in its passes.
_ATTENTION_SHARES = {FORWARD: 4 / 14, RECOMPUTE: 4 / 14, BACKWARD: 10 / 14}

#: Most of the memory's peak that a kernel can reach. Beyond it, some bytes come from a cache.
MOST = 1.0

_UNKNOWN = {"flops": None, "bytes": None, "least_us": None, "roofline": None}


def with_costs(
    rows: Sequence[dict[str, Any]],
    module: Module | None,
    gpu: Gpu | None,
    attention_flops: float | None = None,
) -> list[dict[str, Any]]:
    """Add to each kernel the costs of one run.

    flops, bytes   of the instruction (`hlo/costs.py`), and of attention by `attention_flops`.
    least_us       least microseconds for the FLOPs and for the bytes, by the GPU's peaks.
    roofline       the larger of the two over the mean time.

    Each is None if unknown.

    Args:     rows: of `breakdown.kernel_rows`. module: None: no cost is known. gpu: None: no
              shares. attention_flops: of one device in one step; its kernels share those of their
              pass by time.
    """
    of_pass = _time_of_attention(rows)
    made = []
    for row in rows:
        cost = _cost(row, module)
        if attention_flops and row["class"] == ATTENTION and cost is not None:
            share = _ATTENTION_SHARES.get(phase := place_of(row["scope"]).phase)
            if share is not None and of_pass[phase]:
                flops = attention_flops * share * row["ms"] / of_pass[phase] / row["count"]
                cost = InstructionCost(round(flops), cost.bytes, "bf16")
        known = {name: value for name, value in row.items() if name != "ops"}
        made.append(known | (_UNKNOWN if cost is None else _figures(row, cost, gpu)))
    return made


def _cost(row: dict[str, Any], module: Module | None) -> InstructionCost | None:
    """Return the mean cost of a kernel's instructions; None if one of them is not known."""
    costs = [(_cost_of_op(row, module, op), count) for op, count in row["ops"].items()]
    runs = sum(count for _, count in costs)
    if any(cost is None for cost, _ in costs):
        return None
    known = [(cost, count) for cost, count in costs if cost is not None]
    flops = [(cost.flops, count) for cost, count in known if cost.flops is not None]
    sizes = [(cost.bytes, count) for cost, count in known if cost.bytes is not None]
    mean = lambda each: round(sum(value * count for value, count in each) / runs)  # noqa: E731
    return InstructionCost(
        flops=mean(flops) if len(flops) == len(known) else None,
        bytes=mean(sizes) if len(sizes) == len(known) else None,
        dtype=known[0][0].dtype,
    )


def _cost_of_op(row: dict[str, Any], module: Module | None, op: str) -> InstructionCost | None:
    instruction = module.instructions.get(op) if module is not None else None
    if module is None or instruction is None or row["class"] not in CLASSES:
        return None  # a collective has its kind as class
    cost = cost_of(module, instruction)
    if is_around(row["name"]) and cost.flops != 0:
        return None
    if cost.flops is None and not uses_tensor_cores(row["name"], row["class"]):
        return replace(cost, flops=0)  # a Pallas kernel without products
    return cost


def _figures(row: dict[str, Any], cost: InstructionCost, gpu: Gpu | None) -> dict[str, Any]:
    if gpu is not None and _too_many(cost.memory_seconds(gpu), row["mean_us"]):
        cost = replace(cost, bytes=None)
    least = None if gpu is None else (cost.compute_seconds(gpu), cost.memory_seconds(gpu))
    share = None
    if least is not None and None not in least and row["mean_us"]:
        share = max(second for second in least if second is not None) * 1e6 / row["mean_us"]
    return {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "least_us": None if least is None else [None if s is None else s * 1e6 for s in least],
        "roofline": share,
    }


def _too_many(seconds: float | None, mean_us: float) -> bool:
    """Whether a kernel cannot have moved that many bytes: it reads only parts, or from a cache."""
    return seconds is not None and seconds * 1e6 > MOST * mean_us


def _time_of_attention(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of attention's kernels by pass."""
    found: dict[str, float] = {}
    for row in rows:
        if row["class"] == ATTENTION:
            phase = place_of(row["scope"]).phase
            found[phase] = found.get(phase, 0.0) + row["ms"]
    return found


def of_matmuls(module: Module | None, ms: float | None, gpu: Gpu | None) -> dict[str, Any] | None:
    """Return the FLOPs of a device's matmuls in a step, and their FLOP/s while they run.

    Args:     ms: of all matmul kernels of a step; None: none ran.
    """
    if module is None or not ms:
        return None
    flops = sum(multiplications(module, instruction) for instruction in module.run_order())
    if not flops:
        return None
    rate = flops / ms * 1e3
    return {
        "flops": flops,
        "flops_per_second": rate,
        "share": rate / gpu.peak.value if gpu else None,
    }
