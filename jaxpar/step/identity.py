"""The identity of a lowered program: what it computes, without the names of its parts."""

import hashlib
import io
from typing import Any

from jaxlib.mlir import ir, passmanager


def identity(lowered: Any) -> bytes:
    """Return MLIR bytecode of a lowered program in which inner functions are named by content.

    It is the same in every process that lowers the same program. JAX writes an inner function that
    is called twice once or twice, and numbers its name, depending on what the process has traced
    before (docs/experiments.md#names-of-inner-functions). Therefore a call names a hash
    of what it calls. Places in the source are left out.

    As text, a program for thousands of devices is far larger: each ring of a mesh axis is written
    out at each of its uses (docs/experiments.md#program-text).

    Args:     lowered: `jax.stages.Lowered`; it is not changed.
    """
    module = lowered.compiler_ir()
    with module.context:
        program = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(program)
        _name_by_content(program)
        return _bytecode(program)


def _name_by_content(program: Any) -> None:
    """Name functions in calls by a hash of their bytecode, and remove them from the program.

    Functions that no call names stay: the program's own, and those that another operation names.
    """
    top = [op.operation for op in program.regions[0].blocks[0].operations]
    functions = {f.attributes["sym_name"].value: f for f in top if f.name == "func.func"}
    calls = {name: _calls(function) for name, function in functions.items()}
    hashes: dict[str, ir.FlatSymbolRefAttr] = {}

    def hashed(name: str) -> ir.FlatSymbolRefAttr:
        if name not in hashes:
            function = functions[name]
            rename(name)
            function.attributes["sym_name"] = ir.StringAttr.get("")
            digest = hashlib.sha256(_bytecode(function)).hexdigest()
            hashes[name] = ir.FlatSymbolRefAttr.get(digest)
        return hashes[name]

    def rename(name: str) -> None:
        for call in calls[name]:
            call.attributes["callee"] = hashed(call.attributes["callee"].value)

    called = {call.attributes["callee"].value for found in calls.values() for call in found}
    for name in (name for name in functions if name not in called):
        rename(name)
    for name in (name for name in functions if name in called):
        functions[name].erase()


def _calls(function: Any) -> list[Any]:
    found = []

    def visit(operation: Any) -> ir.WalkResult:
        if operation.name == "func.call":
            found.append(operation)
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    return found


def _bytecode(operation: Any) -> bytes:
    output = io.BytesIO()
    operation.write_bytecode(file=output)
    return output.getvalue()
