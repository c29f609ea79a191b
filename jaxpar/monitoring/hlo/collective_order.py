"""Lists the collectives of a compiled step in the order in which a device runs them."""

from collections.abc import Iterator

from jaxpar.monitoring.hlo.collective_bytes import SENT, group_size
from jaxpar.monitoring.hlo.text import Module, parse


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
