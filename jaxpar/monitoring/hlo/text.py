"""Parses the optimized HLO text of a compiled program, as far as profiling needs it."""

import functools
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """An instruction: one line of a computation.

    `type` is that of the result. `attributes` is the text after the operands: metadata, called
    computations, replica groups, backend config. Operands are names, or name#index for an element
    of a tuple. The only operand of a parameter is its number.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def scope(self) -> str:
        """The op_name, such as jit(f)/jvp(attention)/dot_general."""
        return self.attribute(r'op_name="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Return the first group of a regular expression in the attributes; "" without a match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, *names: str) -> list[str]:
        """Return the computations given as `name=%computation` or `name={%one, %two}`."""
        found = [self.attribute(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)") for name in names]
        return [c for text in found for c in re.findall(r"[\w.\-]+", text)]

    def trip_count(self) -> int | None:
        """Return how often the body of a `while` runs; None if XLA does not know."""
        found = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None


@dataclass(frozen=True)
class Module:
    """A program: its computations, with instructions in scheduled order."""

    name: str
    num_devices: int
    entry: str
    computations: dict[str, list[Instruction]]

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name, which is unique in a program."""
        return {i.name: i for body in self.computations.values() for i in body}

    def type_of(self, operand: str) -> str | None:
        """Return the type of an operand; None if the text does not have it."""
        name, _, index = operand.partition("#")
        made = self.instructions.get(name)
        if made is None or not index:
            return None if made is None else made.type
        return elements_of(made.type)[int(index)]

    def run_order(self, computation: str = "") -> list[Instruction]:
        """Return the instructions in the order in which they run.

        The body of a loop is repeated by its trip count. If that is unknown, only its condition
        appears, once: these are loops of further rounds, of which most have no turn. The branches
        of a conditional are not included.
        """
        found: list[Instruction] = []
        for instruction in self.computations[computation or self.entry]:
            if instruction.opcode == "while":
                turns = instruction.trip_count()
                for part in instruction.called("condition" if turns is None else "body"):
                    found += self.run_order(part) * (1 if turns is None else turns)
            elif instruction.opcode == "call":
                for body in instruction.called("to_apply"):
                    found += self.run_order(body)
            else:
                found.append(instruction)
        return found


def parse(text: str) -> Module:
    """Parse `compiled.as_text()`.

    Raises:   ValueError if the text is not an HLO module.
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
    """Return the module's name, which the profiler uses too: jit_train_step.

    Raises:   ValueError if the text is not an HLO module.
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
    """Return the position of the parenthesis that closes the one open at `start`."""
    depth = 1
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dims of each array in a type."""
    found = _ARRAY.findall(type_text)
    return [(name, tuple(int(d) for d in dims.split(",") if d)) for name, _, dims in found]


def elements_of(type_text: str) -> list[str]:
    """Return the types of a tuple's elements."""
    inside, found, depth = re.sub(r"/\*.*?\*/", "", type_text[1:-1]), [""], 0
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found]


def num_bytes(type_text: str) -> int:
    """Return the bytes of an HLO type: bf16[8,128]{1,0}, or a tuple. Tokens have 0."""
    bits = 0
    for name, width, dims in _ARRAY.findall(type_text):
        elements = 1
        for dim in filter(None, dims.split(",")):
            elements *= int(dim)
        bits += elements * (8 if name == "pred" else int(width))
    return -(-bits // 8)


def shape_of(type_text: str) -> str:
    """Return a type without layouts and workspace; for a tuple, the first elements."""
    plain = re.sub(r"\{[^}]*\}|/\*.*?\*/|, s8\[\d+\](?=(\{[^}]*\})?\)$)", "", type_text)
    arrays = [found[0] for found in _ARRAY.finditer(plain)]
    if len(arrays) <= 1:
        return arrays[0] if arrays else ""
    return f"({', '.join(arrays[:3])}{', ...' if len(arrays) > 3 else ''})"
