"""The optimized HLO text of a compiled program, read as far as profiling needs it."""

import functools
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `type` is the result's, `attributes` the text after the operands: metadata, called computations,
    replica groups, backend config. Operands are names; of one in a tuple, name#index. The one
    operand of a parameter is its number.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def scope(self) -> str:
        """Where in the traced program it comes from, as jit(f)/jvp(attention)/dot_general."""
        return self.attribute(r'op_name="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression in the attributes; "" without a match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, *names: str) -> list[str]:
        """Computations given as `name=%computation` or `name={%one, %two}`."""
        found = [self.attribute(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)") for name in names]
        return [c for text in found for c in re.findall(r"[\w.\-]+", text)]

    def trip_count(self) -> int | None:
        """How often the body of a `while` runs; None where XLA does not know."""
        found = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None


@dataclass(frozen=True)
class Module:
    """A program: its computations, in the order in which they are scheduled."""

    name: str
    num_devices: int
    entry: str
    computations: dict[str, list[Instruction]]

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction by its name, which is unique in a program."""
        return {i.name: i for body in self.computations.values() for i in body}

    def type_of(self, operand: str) -> str | None:
        """The type of an operand; None if the text lacks it."""
        name, _, index = operand.partition("#")
        made = self.instructions.get(name)
        if made is None or not index:
            return None if made is None else made.type
        return elements_of(made.type)[int(index)]

    def run_order(self, computation: str = "") -> list[Instruction]:
        """The instructions as they run: the body of a loop as often as it turns, once if XLA does
        not know how often; of a conditional, nothing but itself."""
        found: list[Instruction] = []
        for instruction in self.computations[computation or self.entry]:
            if instruction.opcode == "while":
                for body in instruction.called("body"):
                    found += self.run_order(body) * (instruction.trip_count() or 1)
            elif instruction.opcode == "call":
                for body in instruction.called("to_apply"):
                    found += self.run_order(body)
            else:
                found.append(instruction)
        return found


def parse(text: str) -> Module:
    """Read `compiled.as_text()`.

    Raises:   ValueError when the text is no HLO module.
    """
    name = module_name(text)
    head, _, rest = text.partition("\n")
    number = {n: int(v) for n, v in re.findall(r"\b(num_partitions|replica_count)=(\d+)", head)}
    entry, body = "", None
    computations: dict[str, list[Instruction]] = {}
    for line in rest.splitlines():
        if line.startswith("}"):
            body = None
        elif body is not None:
            instruction = _instruction(line)
            if instruction:
                body.append(instruction)
        elif found := _COMPUTATION.match(line):
            body = computations[found[2]] = []
            entry = found[2] if found[1] else entry
    if not entry:
        raise ValueError("the HLO module has no ENTRY computation")
    devices = number.get("num_partitions", 1) * number.get("replica_count", 1)
    return Module(name, devices, entry, computations)


def module_name(text: str) -> str:
    """The module's name, under which the profiler knows it too: jit_train_step.

    Raises:   ValueError when the text is no HLO module.
    """
    found = re.match(r"HloModule ([\w.\-]+)", text)
    if not found:
        raise ValueError(f"not the text of an HLO module: {text[:60]!r}")
    return found[1]


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    end = _closing(line, found.end())
    inside = line[found.end() : end]
    operands = (inside,) if found[3] == "parameter" else re.findall(r"%([\w.\-]+(?:#\d+)?)", inside)
    return Instruction(found[1], found[3], found[2], tuple(operands), line[end + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that was open at `start`."""
    depth = 1
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dims of each array of a type."""
    found = _ARRAY.findall(type_text)
    return [(name, tuple(int(d) for d in dims.split(",") if d)) for name, _, dims in found]


def elements_of(type_text: str) -> list[str]:
    """The types in a tuple's type."""
    inside, found, depth = re.sub(r"/\*.*?\*/", "", type_text[1:-1]), [""], 0
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found]


def num_bytes(type_text: str) -> int:
    """Bytes of a type as HLO writes it: bf16[8,128]{1,0}, or a tuple of such. Tokens have none."""
    bits = 0
    for name, width, dims in _ARRAY.findall(type_text):
        elements = 1
        for dim in filter(None, dims.split(",")):
            elements *= int(dim)
        bits += elements * (8 if name == "pred" else int(width))
    return -(-bits // 8)


def shape_of(type_text: str) -> str:
    """A type without layouts and a library call's workspace; of a tuple, the first entries."""
    plain = re.sub(r"\{[^}]*\}|/\*.*?\*/|, s8\[\d+\](?=(\{[^}]*\})?\)$)", "", type_text)
    arrays = [found[0] for found in _ARRAY.finditer(plain)]
    if len(arrays) <= 1:
        return arrays[0] if arrays else ""
    return f"({', '.join(arrays[:3])}{', ...' if len(arrays) > 3 else ''})"
