"""Extracts the matrix products of a compiled program, so that each can be run separately.

Arrays are described by their memory layout: dims from slowest to contiguous. A product that XLA
wrote transposed or with another dim order is thus the same `dot_general` of arrays in JAX's default
layout.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.monitoring.hlo import Instruction, Module
from jaxpar.tools.profiling.trace.cpu_trace import contracted_dims

_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\](?:\{([\d,]*))?")
#: Supported dtypes: HLO's and JAX's names. FLOAT8 dtypes are supported as operands.
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
FLOAT8 = {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class Product:
    """A matrix product of left and right. `adds`: it accumulates into an existing array.

    left, right    dims in memory order.
    dtype          dtype of left, and of right if `right_dtype` is "".
    fast           for float8: accumulation with less than float32 precision.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    over_left: tuple[int, ...]
    over_right: tuple[int, ...]
    dtype: str
    result_dtype: str
    adds: bool = False
    right_dtype: str = ""
    fast: bool = False

    def __str__(self) -> str:
        """Describe it: bfloat16[32768,2048] x [2048,3072] over 1 and 0."""
        sides = [",".join(map(str, dims)) for dims in (self.left, self.right)]
        over = [",".join(map(str, dims)) for dims in (self.over_left, self.over_right)]
        text = f"{self.dtype}[{sides[0]}] x {self.right_dtype}[{sides[1]}]"
        return (
            f"{text} over {over[0]} and {over[1]}"
            + f" in {self.result_dtype}" * (self.result_dtype != self.dtype)
            + ", added" * self.adds
            + ", fast" * self.fast
        )

    def as_json(self) -> dict[str, object]:
        """Return it as JSON, for the process that runs it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Array:
    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    """The dims from slowest to contiguous."""

    def laid_out(self) -> tuple[int, ...]:
        return tuple(self.dims[dim] for dim in self.order)


def _array(type_text: str) -> _Array:
    """Return the first array of a type."""
    found = _ARRAY.search(type_text)
    if not found:
        raise ValueError(f"no array in {type_text!r}")
    dims = tuple(int(n) for n in found[2].split(",") if n)
    minor_first = [int(n) for n in (found[3] or "").split(",") if n]
    order = tuple(reversed(minor_first)) if minor_first else tuple(range(len(dims)))
    return _Array(found[1], dims, order)


def product_of(module: Module, instruction: Instruction) -> Product | None:
    """Return the product of an instruction or fusion; None if there is none, or it is unsupported.

    Unsupported are batch dims, operands of two dtypes other than float8, results with another dim
    order, and biases.
    """
    if instruction.opcode == "fusion":
        inside = [
            each for name in instruction.called("calls") for each in module.computations[name]
        ]
        found = [product for each in inside if (product := product_of(module, each))]
        return found[0] if len(found) == 1 else None
    read = contracted_dims(instruction)
    if read is None or _in_batches(instruction) or len(instruction.operands) < 2:
        return None
    types = [module.type_of(operand) for operand in instruction.operands[:2]]
    if None in types:
        return None
    sides = [_array(each) for each in types if each is not None]
    result = _array(instruction.type)
    scaled = _is_scaled(instruction)
    dtypes = {side.dtype for side in sides}
    known = dtypes <= set(FLOAT8) if scaled else len(dtypes) == 1 and dtypes <= set(DTYPES)
    if not known or result.dtype not in DTYPES:
        return None
    overs = [
        tuple(side.order.index(dim) for dim in over) for side, over in zip(sides, read, strict=True)
    ]
    left_first, right_first = _orders(sides, read)
    written = [dim for dim in result.order if result.dims[dim] > 1]
    if written == right_first != left_first:
        sides, overs = sides[::-1], overs[::-1]
    elif written != left_first:
        return None
    adds = len(instruction.operands) > (4 if scaled else 2)
    if adds and _dims(module.type_of(instruction.operands[2])) != result.dims:
        return None
    left_dtype, right_dtype = ((DTYPES | FLOAT8)[side.dtype] for side in sides)
    return Product(
        left=sides[0].laid_out(),
        right=sides[1].laid_out(),
        over_left=overs[0],
        over_right=overs[1],
        dtype=left_dtype,
        result_dtype=DTYPES[result.dtype],
        adds=adds,
        right_dtype="" if right_dtype == left_dtype else right_dtype,
        fast=scaled and '"operand_precision":["DEFAULT","DEFAULT"]' in instruction.attributes,
    )


def _orders(
    sides: Sequence[_Array], overs: tuple[Sequence[int], Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Return the memory order of the result's dims larger than 1 in JAX's default layout.

    The first has the left side's dims first, the second the right side's.
    """
    found, begin = [], 0
    for side, over in zip(sides, overs, strict=True):
        free = [dim for dim in range(len(side.dims)) if dim not in over]
        in_memory = [dim for dim in side.order if dim in free and side.dims[dim] > 1]
        found.append([begin + free.index(dim) for dim in in_memory])
        begin += len(free)
    return found[0] + found[1], found[1] + found[0]


def _dims(type_text: str | None) -> tuple[int, ...] | None:
    return None if type_text is None else _array(type_text).dims


def _in_batches(instruction: Instruction) -> bool:
    """Return whether a product has batch dims."""
    pattern = r'lhs_batch_dims=\{\d|"lhs_batch_dimensions":\["'
    return re.search(pattern, instruction.attributes) is not None


def _is_scaled(instruction: Instruction) -> bool:
    """Return whether a product is in float8, with a scale for each operand."""
    return re.search(r'custom_call_target="[^"]*\$f8"', instruction.attributes) is not None


def find(module: Module, line: str) -> list[Product]:
    """Return the products of a line of HLO in the final program: one per layer.

    The instruction's name may have changed, but not its op_name and result.
    """
    scope = re.findall(r'op_name="([^"]*)"', line)
    result = _array(line.partition(" = ")[2])
    found = []
    for instruction in module.run_order():
        if not scope or instruction.scope != scope[0] or "[" not in instruction.type:
            continue
        made = _array(instruction.type)
        if (made.dtype, made.dims) == (result.dtype, result.dims):
            product = product_of(module, instruction)
            found += [product] if product is not None else []
    return found
