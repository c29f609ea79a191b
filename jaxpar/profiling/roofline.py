"""Adds FLOPs, bytes and shares of a GPU's peaks to the figures of `breakdown`."""

from typing import Any

from jaxpar.planning.predict.hardware import Gpu
from jaxpar.profiling.hlo.costs import cost_of, multiplications
from jaxpar.profiling.hlo.text import Module
from jaxpar.profiling.trace.kernels import CLASSES, MATMUL


def with_costs(profile: dict[str, Any], module: Module, gpu: Gpu | None) -> dict[str, Any]:
    """Add FLOPs, bytes and roofline share of each top kernel and of all matmuls.

    Args:     profile: the result of `breakdown.profile`. gpu: the GPU whose peaks to use; None: no
              shares.
    """
    rows = [row | _of_kernel(row, module, gpu) for row in profile["top_kernels"]]
    return profile | {"top_kernels": rows, "matmuls": _of_matmuls(profile, module, gpu)}


def _of_kernel(row: dict[str, Any], module: Module, gpu: Gpu | None) -> dict[str, Any]:
    instruction = module.instructions.get(row["op"])
    if instruction is None or row["class"] not in CLASSES:  # a collective has its kind as class
        return {"flops": None, "bytes": None, "roofline": None}
    cost = cost_of(module, instruction)
    least = cost.seconds(gpu) if gpu is not None else None
    share = None if least is None else least * 1e6 / row["mean_us"]
    return {"flops": cost.flops, "bytes": cost.bytes, "roofline": share}


def _of_matmuls(profile: dict[str, Any], module: Module, gpu: Gpu | None) -> dict[str, Any] | None:
    """Return the FLOPs of a device's matmuls in a step, and their FLOP/s while they run."""
    flops = sum(multiplications(module, instruction) for instruction in module.run_order())
    ms = profile["by_class"].get(MATMUL, {}).get("ms")
    if not flops or not ms:
        return None
    rate = flops / ms * 1e3
    return {
        "flops": flops,
        "flops_per_second": rate,
        "share": rate / gpu.peak.value if gpu else None,
    }
