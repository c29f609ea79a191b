"""What an instruction has to do at least: its multiplications and the bytes that it moves.

FLOPs are those of matrix products alone, 2 per multiplication and addition: whatever else a kernel
computes is hidden behind its bytes. Bytes count each operand once and each result once, as if
caches were perfect; of an operand of which a fusion takes a slice, the slice, and of a result that
it writes into an operand in place, the piece that it writes.

    time at least = max(FLOPs / peak FLOP/s, bytes / bandwidth)

and the roofline share of a kernel is that time over the one it took.

Source:   Williams et al. 2009, "Roofline".
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.planning.predict.hardware import Gpu
from jaxpar.profiling.hlo.text import Instruction, Module, arrays_of, num_bytes

#: Types in which `Gpu.peak` holds, and those in which it is twice as much.
_HALF, _EIGHT_BITS = ("bf16", "f16"), ("f8e4m3fn", "f8e5m2", "s8")

_SLICES = ("slice", "dynamic-slice", "gather")

#: What gives each number of its operand once: a slice of it reads no more of the operand.
_ONE_BY_ONE = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclass(frozen=True)
class InstructionCost:
    """Of one run of an instruction. flops is None where the text does not tell (a kernel of our
    own, or cuDNN's attention), bytes where it lacks an operand; dtype is that of the products."""

    flops: int | None
    bytes: int | None
    dtype: str = ""

    def seconds(self, gpu: Gpu) -> float | None:
        """The least time on a GPU; None where the FLOPs, or their dtype's peak, are unknown."""
        if self.flops is None or self.bytes is None:
            return None
        peak = gpu.peak.value * (2 if self.dtype in _EIGHT_BITS else 1)
        if self.flops and self.dtype not in _HALF + _EIGHT_BITS:
            return None
        return max(self.flops / peak, self.bytes / gpu.bandwidth.value)


def cost_of(module: Module, instruction: Instruction) -> InstructionCost:
    """What an instruction has to do."""
    flops: int | None = multiplications(module, instruction)
    if flops == 0 and instruction.opcode == "custom-call":
        flops = None
    return InstructionCost(flops, _bytes(module, instruction), _dtype(module, instruction))


def multiplications(module: Module, instruction: Instruction) -> int:
    """FLOPs of the matrix products of an instruction, or of the fusion that it is."""
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
    """Dims of the two operands over which a product sums; None for other instructions."""
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
    """Dtype of the left operand of the products in an instruction; "" without any."""
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
    # The last array of a library call's result is its workspace, which is not its result.
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
    return sum(read) + written


def _users(body: Sequence[Instruction], name: str) -> list[Instruction]:
    return [i for i in body if name in i.operands]


def _sliced(body: Sequence[Instruction], array: Instruction) -> int | None:
    """How many numbers of an array all slices of it have; None if something reads all of it."""
    total, users = 0, _users(body, array.name)
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == array.name:
            taken: int | None = _count(user.type)
        else:
            taken = _sliced(body, user) if user.opcode in _ONE_BY_ONE else None
        if taken is None:
            return None
        total += taken
    return total if users else None


def _count(type_text: str) -> int:
    """Numbers in an array's type."""
    return sum(math.prod(dims) for _, dims in arrays_of(type_text))
