"""Reads the instructions that ran on a CPU from a trace, and classifies them.

XLA marks every instruction that runs on a host thread with its HLO name, its (simulated) device and
its execution. There are no streams: a device mostly runs one instruction at a time, and waits for
other devices in collectives. Simulated devices share the host's cores, so their times differ from
those of real devices.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpar.monitoring.hlo import SENT, Instruction, Module, arrays_of
from jaxpar.tools.profiling.trace import kernels
from jaxpar.tools.profiling.trace.read import KernelTrace, NoKernels, ProfiledKernel, stats_of

# ------------------------------- FLOPs of the matrix products in an instruction, 2 per multiply-add


def multiplications(module: Module, instruction: Instruction) -> int:
    """Return the FLOPs of the matrix products in an instruction or fusion."""
    if instruction.opcode == "fusion":
        inside = [module.computations.get(name, []) for name in instruction.called("calls")]
        return sum(multiplications(module, each) for body in inside for each in body)
    dims = contracted_dims(instruction)
    left = module.type_of(instruction.operands[0]) if instruction.operands else None
    if dims is None or left is None:
        return 0
    sizes = arrays_of(left)[0][1]
    result = arrays_of(instruction.type)[0][1]
    return 2 * math.prod(result) * math.prod(sizes[dim] for dim in dims[0])


def contracted_dims(instruction: Instruction) -> tuple[list[int], list[int]] | None:
    """Return the contracted dims of a matmul's two operands; None for other instructions."""
    if instruction.opcode == "dot":
        pattern = r"SIDE_contracting_dims=\{([\d,]*)\}"
    elif "cublas" in instruction.attribute(r'custom_call_target="([^"]*)"'):
        pattern = r'"SIDE_contracting_dimensions":\[([^\]]*)\]'
    else:
        return None
    left, right = (instruction.attribute(pattern.replace("SIDE", s)) for s in ("lhs", "rhs"))
    if instruction.opcode != "dot" and not left:
        return None
    return _numbers(left), _numbers(right)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


#: Instructions that are the time of those within them.
_AROUND = re.compile(r"(while|call|conditional)\b")


def read(plane: Any, module: str = "") -> KernelTrace:
    """Read the instructions of one module by simulated device and execution.

    Args:     plane: the host's plane. module: name in HLO; "": the module with the most time.
    Raises:   NoKernels if none ran.
    """
    found: dict[str, dict[int, dict[int, list[ProfiledKernel]]]] = {}
    for line in plane.lines if plane is not None else ():
        for event in line.events:
            if event.name.startswith("end: ") or _AROUND.match(event.name):
                continue
            stats = stats_of(event)
            if "hlo_op" not in stats:
                continue
            devices = found.setdefault(str(stats["hlo_module"]), defaultdict(dict))
            runs = devices[int(stats.get("device_ordinal", 0))]
            start, op = int(event.start_ns), str(stats["hlo_op"])
            end = start + int(event.duration_ns)
            kernel = ProfiledKernel(op, start, end, line.name, op)
            runs.setdefault(int(stats.get("run_id", 0)), []).append(kernel)
    if not found:
        raise NoKernels("the trace has neither a GPU plane nor CPU instructions")
    module = module or _longest(found)
    if module not in found:
        raise NoKernels(f"no device ran {module} in the trace")
    return KernelTrace(
        module, {n: _in_order(runs) for n, runs in found[module].items()}, on_gpu=False
    )


def _longest(found: dict[str, dict[int, dict[int, list[ProfiledKernel]]]]) -> str:
    time: Counter[str] = Counter()
    for module, devices in found.items():
        for runs in devices.values():
            time[module] += sum(k.end - k.start for step in runs.values() for k in step)
    return time.most_common(1)[0][0]


def _in_order(runs: dict[int, list[ProfiledKernel]]) -> list[list[ProfiledKernel]]:
    steps = [sorted(step, key=lambda kernel: kernel.interval) for step in runs.values()]
    return sorted(steps, key=lambda step: step[0].start)


def classify_instructions(trace: KernelTrace, module: Module) -> KernelTrace:
    """Return the trace with the class of each instruction, from its HLO."""

    def known(step: Sequence[ProfiledKernel]) -> list[ProfiledKernel]:
        return [_with_class(kernel, module) for kernel in step]

    return replace(trace, devices={n: list(map(known, s)) for n, s in trace.devices.items()})


def _with_class(kernel: ProfiledKernel, module: Module) -> ProfiledKernel:
    instruction = module.instructions.get(kernel.op)
    if instruction is None:
        return kernel
    what, kind = _class_of(module, instruction)
    return replace(kernel, what=what, kind=kind)


def _class_of(module: Module, instruction: Instruction) -> tuple[str, str]:
    opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if opcode in SENT:
        return kernels.COMMUNICATION, SENT[opcode][0]
    if multiplications(module, instruction):
        return kernels.MATMUL, ""
    if opcode == "copy":
        return kernels.COPY, ""
    return (kernels.FUSION if opcode == "fusion" else kernels.OTHER), ""
