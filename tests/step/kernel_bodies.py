"""The bodies of kernels in a lowered program, without places in the source or in a process."""

import functools
import hashlib
import io
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jaxlib.mlir import ir, passmanager

#: What embeds the body of a kernel, or what it is compiled with, in the text of a program.
KERNEL = re.compile(r'\b(module|source|kernel_hash|backend_config) = "((?:[^"\\]|\\.){24,})"')

#: How MLIR writes bytes in a string.
ESCAPE = re.compile(rb'\\([0-9A-F]{2}|[\\"nt])')
MLIR = b"ML\xefR"  # how MLIR bytecode begins
TRITON = re.compile(rb"@triton.jit\ndef (\w+)\(")
NUMBERED = "mosaic_gpu.dump_basename"  # counts the kernels that the process has lowered
NAMED = {b"n": b"\n", b"t": b"\t", b"\\": b"\\", b'"': b'"'}


class Kernel(NamedTuple):
    """The body of a kernel: MLIR bytecode, Triton's source, or what a library is asked for."""

    name: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.name} {self.digest}"

    @property
    def digest(self) -> str:
        """The hash of the body."""
        return digest_of(self.body)

    def text(self) -> str:
        """The body in words. That of an attention kernel has 7 MB."""
        if not self.body.startswith(MLIR):
            return self.body.decode("utf-8", "replace")
        with _context():
            return str(ir.Module.parse(self.body))


def without_bodies(text: str) -> str:
    """A program's text without the bodies of its kernels."""
    return KERNEL.sub(r'\1 = "..."', text)


def kernels_of(text: str) -> list[Kernel]:
    """The different kernels of a program, in order: Triton's (`source`), Mosaic's (`module`), and
    what libraries are asked for (`backend_config`). `kernel_hash` is of a body with its places.
    """
    found: dict[str, None] = {}
    for embedded in KERNEL.finditer(text):
        if embedded[1] != "kernel_hash":
            found[embedded[2]] = None
    return list(dict.fromkeys(map(kernel_of, found)))


@functools.lru_cache(maxsize=256)  # programs share kernels
def kernel_of(escaped: str) -> Kernel:
    """The kernel of an embedded string."""
    body = ESCAPE.sub(_byte, escaped.encode("utf-8", "surrogateescape"))
    if not body.startswith(MLIR):
        name = TRITON.search(body)
        return Kernel(name[1].decode() if name else "config", body)
    with _context():
        module = ir.Module.parse(body)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        if NUMBERED in module.operation.attributes:
            del module.operation.attributes[NUMBERED]
        stripped = io.BytesIO()
        module.operation.write_bytecode(stripped)
        return Kernel(next(filter(None, _names(module)), "kernel"), stripped.getvalue())


def _context() -> ir.Context:
    """A context with the dialects of kernels. Mosaic's stable form is not a registered one."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic_gpu_dialect.register_dialect(context)
    return context


def _byte(escape: re.Match[bytes]) -> bytes:
    return NAMED.get(escape[1]) or bytes([int(escape[1], 16)])


def _names(module: ir.Module) -> Iterator[str]:
    """The name of a module, and those of what it declares."""
    for operation in (module.operation, *(op.operation for op in module.body.operations)):
        if "sym_name" in operation.attributes:
            yield ir.StringAttr(operation.attributes["sym_name"]).value


def digest_of(body: bytes) -> str:
    """The hash of bytes, short."""
    return hashlib.sha256(body).hexdigest()[:16]
