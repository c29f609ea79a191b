"""Counts the collectives of a compiled step and the bytes that they send.

The bytes are those that one device sends in a step, with n devices per group and operands of S
bytes per device:

    all-gather           S (n - 1)        its shard, to each of the others
    reduce-scatter       S (n - 1) / n    each of the other shards
    all-reduce           2 S (n - 1) / n  a reduce-scatter and an all-gather, as in a ring
    all-to-all           S (n - 1) / n    all but its own shard
    permute              S                for a device that sends
    broadcast            S

An algorithm may send more or less, for example if a switch reduces. The figures serve to compare
programs and to estimate times from link speeds. Collectives over one device are not counted.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from jaxpar.monitoring.hlo.text import Instruction, Module, num_bytes, parse

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
