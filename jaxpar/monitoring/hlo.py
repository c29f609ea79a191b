"""Reads the optimized HLO of a compiled program: its instructions, and what it sends.

The bytes of a collective are those that one device sends in a step, with n devices per group and
operands of S bytes per device:

    all-gather           S (n - 1)        its shard, to each of the others
    reduce-scatter       S (n - 1) / n    each of the other shards
    all-reduce           2 S (n - 1) / n  a reduce-scatter and an all-gather, as in a ring
    all-to-all           S (n - 1) / n    all but its own shard
    permute              S                for a device that sends
    broadcast            S

An algorithm may send more or less, for example if a switch reduces. The figures serve to compare
programs and to estimate times from link speeds. Collectives over one device are not counted.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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


#: Kind and bytes sent by opcode. Asynchronous collectives are counted at their -start.
SENT = {
    "all-gather": ("all-gather", lambda size, n: size * (n - 1)),
    "reduce-scatter": ("reduce-scatter", lambda size, n: size * (n - 1) // n),
    "all-reduce": ("all-reduce", lambda size, n: 2 * size * (n - 1) // n),
    "all-to-all": ("all-to-all", lambda size, n: size * (n - 1) // n),
    "ragged-all-to-all": ("all-to-all", lambda size, n: size * (n - 1) // n),
    "collective-permute": ("permute", lambda size, n: size if n > 1 else 0),
    "collective-broadcast": ("broadcast", lambda size, n: size if n > 1 else 0),
}


_GROUPS = r"replica_groups=(mesh\[.*?\][^{]*\{.*?\}|\[.*?\]<=|\{(?:\{.*?\},?)*\})"


@dataclass
class Sent:
    """Count and bytes by kind. If `unknown` is not empty, they are lower bounds."""

    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def card(self) -> dict[str, Any]:
        """Return the entry of a card."""
        total = sum(row["bytes"] for row in self.kinds.values())
        ordered = dict(sorted(self.kinds.items(), key=lambda item: -item[1]["bytes"]))
        return {"bytes": total, "kinds": ordered, "unknown": self.unknown}


def collective_bytes(hlo_text: str) -> Sent:
    """Count the collectives of `compiled.as_text()`.

    A loop's body counts by its trip count, or once if that is unknown. A conditional's branches do
    not count. `unknown` describes both.

    Raises:   ValueError if the HLO or a replica group cannot be parsed.
    """
    module, sent = parse(hlo_text), Sent()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    _walk(module, module.entry, 1, counts, sent.unknown)
    sent.kinds = {kind: {"count": n, "bytes": size} for kind, (n, size) in counts.items()}
    return sent


def _walk(
    module: Module, computation: str, times: int, counts: dict[str, list[int]], unknown: list[str]
) -> None:
    """Add what a computation and those that it calls send."""
    for instruction in module.computations.get(computation, ()):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in SENT:
            kind, rule = SENT[opcode]
            sent = rule(_size(module, instruction), group_size(instruction, module.num_devices))
            if sent:
                counts[kind][0] += times
                counts[kind][1] += times * sent
        elif opcode == "while":
            _loop(module, instruction, times, counts, unknown)
        elif opcode == "conditional":
            branches = ("branch_computations", "true_computation", "false_computation")
            if any(_sends(module, c) for c in instruction.called(*branches)):
                unknown.append(f"{instruction.name}: unknown branch; not counted")
        else:
            names = ("calls", "to_apply") if opcode == "call" else ("calls",)
            for called in instruction.called(*names):
                _walk(module, called, times, counts, unknown)


def _loop(
    module: Module,
    instruction: Instruction,
    times: int,
    counts: dict[str, list[int]],
    unknown: list[str],
) -> None:
    turns = instruction.trip_count()
    parts = instruction.called("body", "condition")
    if turns is None and any(_sends(module, part) for part in parts):
        unknown.append(f"{instruction.name}: unknown trip count; counted once")
    for part in parts:
        _walk(module, part, times * (1 if turns is None else turns), counts, unknown)


def _sends(module: Module, computation: str) -> bool:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    unknown: list[str] = []
    _walk(module, computation, 1, counts, unknown)
    return bool(counts or unknown)


def _size(module: Module, instruction: Instruction) -> int:
    """Return the bytes of the operands."""
    types = {operand: module.type_of(operand) for operand in instruction.operands}
    unknown = [operand for operand, found in types.items() if found is None]
    if unknown:
        raise ValueError(f"{instruction.name}: no instruction {unknown[0]} in the HLO")
    return sum(num_bytes(types[operand] or "") for operand in instruction.operands)


def group_size(instruction: Instruction, num_devices: int) -> int:
    """Return the number of devices per group of a collective.

    Replica groups are lists, {{0,1},{2,3}}; an arrangement of all devices, [groups,size]<=[...]; or
    mesh axes, mesh['data'=4,'tensor'=2] {'data'}, possibly a part of one, 'data':(1)2. Empty means
    all devices.

    Raises:   ValueError for any other notation.
    """
    if "source_target_pairs=" in instruction.attributes:
        pairs = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
        return 2 if any(a != b for a, b in re.findall(r"(\d+),(\d+)", pairs)) else 1
    text = instruction.attribute(_GROUPS)
    if found := re.match(r"mesh\[(.*?)\][^{]*\{(.*?)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", found[1])}
        axes = re.findall(r"'(.*?)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    if found := re.match(r"\[\d+,(\d+)\]<=", text):
        return int(found[1])
    if text in ("", "{}", "{{}}"):
        if "replica_groups=" in instruction.attributes and not text:
            raise ValueError(f"{instruction.name}: replica groups in an unknown notation")
        return num_devices
    return text[: text.index("}")].count(",") + 1  # {{0,1},{2,3}}: the first of equal ones


def collective_order(hlo_text: str) -> list[str]:
    """Return a line per collective of `compiled.as_text()`: kind, result, devices, op_name.

    Loops are listed once with their trip count, if known, and an indented body. Asynchronous
    collectives are listed at their start.

    Raises:   ValueError if the HLO cannot be parsed.
    """
    module = parse(hlo_text)
    return list(_lines(module, module.entry, ""))


def _lines(module: Module, computation: str, indent: str) -> Iterator[str]:
    for instruction in module.computations.get(computation, ()):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in SENT:
            devices = group_size(instruction, module.num_devices)
            if devices > 1:
                yield f"{indent}{opcode} {instruction.type} of {devices}  {instruction.scope}"
            continue
        if opcode == "while":
            turns = instruction.trip_count()
            inside = list(_lines(module, instruction.called("body")[0], indent + "  "))
            times = "a loop" if turns is None else f"{turns} times"
            yield from ([f"{indent}{times}:", *inside] if inside else [])
            continue
        branches = ("branch_computations", "true_computation", "false_computation")
        for number, branch in enumerate(instruction.called(*branches)):
            inside = list(_lines(module, branch, indent + "  "))
            yield from ([f"{indent}branch {number}:", *inside] if inside else [])
        for called in instruction.called("calls", *(["to_apply"] if opcode == "call" else [])):
            yield from _lines(module, called, indent)
