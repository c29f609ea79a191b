"""Computes the minimum cost of an instruction: FLOPs of matmuls and bytes moved.

FLOPs count only matrix products, 2 per multiply-add: other computation is assumed to overlap with
memory traffic. Bytes count each operand and each result once, as with perfect caches. If a fusion
slices an operand, only the slice counts, also behind elementwise operations and concatenations. If
it updates an operand in place, only the written part counts.

    minimum time = max(FLOPs / peak FLOP/s, bytes / peak of device memory)

The roofline share of a kernel is the minimum time divided by the measured time.

Source:   Williams et al. 2009, "Roofline".
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.monitoring.hlo.text import Instruction, Module, arrays_of, num_bytes
from jaxpar.planning.predict.hardware import Gpu

#: Dtypes to which `Gpu.peak` applies, and those with twice the peak.
_HALF, _EIGHT_BITS = ("bf16", "f16"), ("f8e4m3fn", "f8e5m2", "s8")

_SLICES = ("slice", "dynamic-slice", "gather")

#: Elementwise opcodes: a slice of the result reads only a slice of each operand.
_ONE_BY_ONE = frozenset(
    "bitcast convert copy reshape transpose add subtract multiply divide negate select compare and "
    "or maximum minimum exponential rsqrt sqrt tanh logistic power abs reduce-precision".split()
)


@dataclass(frozen=True)
class InstructionCost:
    """The cost of one run of an instruction.

    flops is None if the text does not have it (Pallas kernels, cuDNN's attention), bytes if an
    operand is missing. dtype is that of the matmul operands.
    """

    flops: int | None
    bytes: int | None
    dtype: str = ""

    def seconds(self, gpu: Gpu) -> float | None:
        """Return the minimum time on a GPU; None if FLOPs, bytes or the peak are unknown."""
        least = self.compute_seconds(gpu), self.memory_seconds(gpu)
        return None if least[0] is None or least[1] is None else max(least[0], least[1])

    def compute_seconds(self, gpu: Gpu) -> float | None:
        """Return the least time of the FLOPs; None if they or the dtype's peak are unknown."""
        if self.flops is None or (self.flops and self.dtype not in _HALF + _EIGHT_BITS):
            return None
        return self.flops / gpu.peak.value / (2 if self.dtype in _EIGHT_BITS else 1)

    def memory_seconds(self, gpu: Gpu) -> float | None:
        """Return the least time of the bytes; None if they are unknown."""
        return None if self.bytes is None else self.bytes / gpu.memory_peak.value


def cost_of(module: Module, instruction: Instruction) -> InstructionCost:
    """Return the cost of an instruction."""
    flops: int | None = multiplications(module, instruction)
    if flops == 0 and instruction.opcode == "custom-call":
        flops = None
    return InstructionCost(flops, _bytes(module, instruction), _dtype(module, instruction))


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


def _dtype(module: Module, instruction: Instruction) -> str:
    """Return the dtype of the left matmul operand in an instruction; "" without a matmul."""
    if instruction.opcode == "fusion":
        inside = [module.computations.get(name, []) for name in instruction.called("calls")]
        return next((d for body in inside for i in body if (d := _dtype(module, i))), "")
    left = module.type_of(instruction.operands[0]) if instruction.operands else None
    if left is None or contracted_dims(instruction) is None:
        return ""
    return arrays_of(left)[0][0]


def _bytes(module: Module, instruction: Instruction) -> int | None:
    types = [module.type_of(operand) for operand in instruction.operands]
    if None in types:
        return None
    read = [num_bytes(each) for each in types if each is not None]
    # The last array of a library call's result is its workspace.
    written = num_bytes(re.sub(r", s8\[\d+\](\{[^}]*\})?\)$", ")", instruction.type))
    body = [i for name in instruction.called("calls") for i in module.computations.get(name, [])]
    if instruction.opcode != "fusion" or not body:
        return sum(read) + written
    root = body[-1]
    for parameter in body:
        if parameter.opcode != "parameter":
            continue
        users = _users(body, parameter.name)
        at = int(parameter.operands[0])
        sliced = _sliced(body, parameter)
        if at < len(read) and sliced is not None:
            share = sliced / max(1, _count(parameter.type))
            read[at] = round(min(1, share) * num_bytes(parameter.type))
        if at < len(read) and root.opcode == "dynamic-update-slice" and users == [root]:
            piece = module.type_of(root.operands[1])
            if root.operands[0] == parameter.name and piece is not None:
                read[at], written = 0, num_bytes(piece)
        if at < len(read) and root.opcode == "scatter" and users == [root]:
            piece = module.type_of(root.operands[-1])
            if root.operands[0] == parameter.name and piece is not None:
                width = num_bytes(root.type) // max(1, _count(root.type))
                read[at], written = 0, _count(piece) * width
    return sum(read) + written


def _users(body: Sequence[Instruction], name: str) -> list[Instruction]:
    return [i for i in body if name in i.operands]


def _sliced(body: Sequence[Instruction], array: Instruction) -> int | None:
    """Return the number of elements in all slices of an array; None if all of it is read."""
    total, users = 0, _users(body, array.name)
    for user in users:
        taken: int | None = None
        if user.opcode in _SLICES and user.operands[0] == array.name:
            further = _sliced(body, user)  # a slice of the slice
            taken = _count(user.type) if further is None else min(further, _count(user.type))
        elif user.opcode in _ONE_BY_ONE and _count(user.type) == _count(array.type):
            taken = _sliced(body, user)
        elif user.opcode == "concatenate" and (piece := _sliced(body, user)) is not None:
            # Slices of a concatenation are taken from its parts in proportion, on average.
            taken = round(piece * _count(array.type) / max(1, _count(user.type)))
        if taken is None:
            return None
        total += taken
    return total if users else None


def _count(type_text: str) -> int:
    """Return the number of elements of a type."""
    return sum(math.prod(dims) for _, dims in arrays_of(type_text))
