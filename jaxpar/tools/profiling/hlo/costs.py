"""FLOPs of the matrix products in an instruction, 2 per multiply-add."""

import math
import re

from jaxpar.monitoring.hlo import Instruction, Module, arrays_of


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
