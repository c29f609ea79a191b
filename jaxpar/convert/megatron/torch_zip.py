"""What `torch.save` writes: a zip of a pickle, and of each tensor's bytes as they are.

A zip may be a part of a file: checkpoints in PyTorch's distributed format put one for every piece
of a tensor into the same file. Bytes of tensors are memory-mapped.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxpar.convert.safetensors_file import DTYPES

# --------------------- Reads a pickle as a tree of values. Nothing is imported, called or unpickled
#
# A pickle is a program for a stack machine, which may name any function and call it. Here, a name
# stays a `Named`, and a call a `Built`, whose reader decides what it means. Only the instructions
# that PyTorch's own files need are known.
#
# Source:   the Python library's `pickletools`, which parses instructions and documents each.


#: Maximum bytes of a pickle. The metadata of 70B over 1,024 GPUs takes about a tenth.
MAX_BYTES = 256 << 20

_INTEGER_BITS = 64

#: What damaged bytes may raise.
DAMAGE = ValueError, IndexError, TypeError, AttributeError, OverflowError, struct.error


class UnreadablePickle(ValueError):
    """Bytes are not a pickle, or one that does more than describe values."""


@dataclass(frozen=True, eq=False)
class Named:
    """A class or function that a pickle names."""

    name: str
    """With its module: "torch.Size"."""


@dataclass(eq=False)
class Built:
    """An object that a pickle would build: of a class or function, from values."""

    of: Named
    args: Any
    state: Any = None

    def fields(self) -> dict[str, Any]:
        """Return the state as fields by name.

        Raises:   UnreadablePickle if it is not a dict with names.
        """
        if not isinstance(self.state, Pairs):
            raise UnreadablePickle(f"{self.of.name} has no fields")
        return self.state.by_name()


@dataclass(eq=False)
class Pairs:
    """A dict. Its keys may be any values, so it is kept as pairs: nothing is hashed."""

    pairs: list[tuple[Any, Any]]

    def by_name(self) -> dict[str, Any]:
        """Return the values of the keys that are strings."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(frozen=True, eq=False)
class External:
    """A value outside the pickle, by its reference."""

    reference: Any


def read_pickle(data: bytes, allowed: tuple[str, ...] | None = None) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, bytes, list, tuple, or a class
    of this module.

    Args:     allowed: how the names in it may begin. None: any name. None is ever looked up.
    Raises:   UnreadablePickle for other names or instructions, damage, and more than MAX_BYTES.
    """
    if len(data) > MAX_BYTES:
        raise UnreadablePickle(f"has more than {MAX_BYTES} bytes")
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.run(opcode.name, argument)
    except UnreadablePickle:
        raise
    except DAMAGE as error:
        raise UnreadablePickle(f"is damaged ({error})") from error
    raise UnreadablePickle("is truncated")


class _Machine:
    def __init__(self, allowed: tuple[str, ...] | None):
        self.allowed = allowed
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            if isinstance(argument, int) and argument.bit_length() > _INTEGER_BITS:
                raise UnreadablePickle(f"has an integer of {argument.bit_length()} bits")
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _SHORT_TUPLES:
            count = _SHORT_TUPLES[name]
            values = self.stack[-count:]
            if len(values) < count:
                raise IndexError("a tuple lacks values")
            self.stack[-count:] = [tuple(values)]
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise UnreadablePickle(f"has the instruction {name}, which no tensor needs")

    def marked(self) -> list[Any]:
        values, self.stack = self.stack, self.marks.pop()
        return values

    def mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def name(self, text: str) -> None:
        if self.allowed is not None and not text.startswith(self.allowed):
            raise UnreadablePickle(f"names {text[:80]!r}, which is refused")
        self.stack.append(Named(text))

    def stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "?")

    def build(self, _: Any) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        self.stack.append(Built(of if isinstance(of, Named) else Named("a value"), args))

    def set_state(self, _: Any) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state

    def items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        # An OrderedDict is built by a call, and gets its items like a dict.
        if isinstance(target, Built):
            target.state = target.state or Pairs([])
            target = target.state
        target.pairs += zip(values[::2], values[1::2], strict=True)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.items([key, value])

    def append(self, _: Any) -> None:
        value = self.stack.pop()
        self.stack[-1].append(value)

    def extend(self, _: Any) -> None:
        values = self.marked()
        self.stack[-1].extend(values)

    def long_tuple(self, _: Any) -> None:
        values = self.marked()
        self.stack.append(tuple(values))

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"no value {index}")
        self.stack.append(self.memo[index])


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_DICT": lambda: Pairs([]),
}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": _Machine.long_tuple,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.extend,
    "ADDITEMS": _Machine.extend,
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine, _: machine.items(machine.marked()),
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": lambda machine, text: machine.name(text.replace(" ", ".", 1)),
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.build,
    "NEWOBJ": _Machine.build,
    "BUILD": _Machine.set_state,
    "BINPERSID": lambda machine, _: machine.stack.append(External(machine.stack.pop())),
}


#: Names in the format of safetensors, by the class of a storage.
STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
}
REBUILD = "torch._utils._rebuild_tensor_v2"

#: What the pickle of a tensor may name.
_NAMES = (*STORAGES, REBUILD, "collections.OrderedDict")

#: Length of a local header of a zip, before the name.
_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Span:
    """A part of a file."""

    file: Path
    offset: int
    length: int


class _Window(io.RawIOBase):
    """A part of a file as a file, read-only."""

    def __init__(self, span: Span):
        self.source, self.span, self.at = span.file.open("rb"), span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.span.length}[whence]
        self.at = max(start + offset, 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self.span.length - self.at), 0)
        self.source.seek(self.span.offset + self.at)
        data = self.source.read(count)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def close(self) -> None:
        self.source.close()
        super().close()


def read_object(span: Span) -> Any:
    """Read the value of a zip whose pickle may name anything; nothing is looked up.

    Raises:   UnreadablePickle for damage; OSError.
    """
    return _read(span, None)[0]


def open_tensor(span: Span, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Open the tensor of a zip as a memory map.

    Args:     shape, dtype: what it must have; dtype is a name of safetensors.
    Raises:   UnreadablePickle for damage, and for any other tensor; OSError.
    """
    tree, entries = _read(span, _NAMES)
    key, found, offset, size, strides = _described(tree)
    steps = tuple(step for step, n in zip(strides, size, strict=True) if n != 1)
    if (found, size) != (dtype, shape) or steps != _row_major(shape):
        rule = f"holds {found} {list(size)}, not contiguous {dtype} {list(shape)}"
        raise UnreadablePickle(rule)
    count, item = math.prod(shape), DTYPES[dtype].itemsize
    if f"data/{key}" not in entries:
        raise UnreadablePickle(f"has no data/{key}")
    start, num_bytes = entries[f"data/{key}"]
    if offset < 0 or (offset + count) * item > num_bytes:
        raise UnreadablePickle(f"has {num_bytes} bytes for {count} values at {offset}")
    at = span.offset + start + offset * item
    return np.memmap(span.file, DTYPES[dtype], "r", at, shape)


def _described(tree: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return the tensor of a pickle: entry of its storage, dtype, offset, shape and strides."""
    try:
        if tree.of.name != REBUILD or not isinstance(tree.args[0], External):
            raise TypeError("not a tensor")
        stored, offset, size, strides = tree.args[:4]
        _, kind, key, _, _ = stored.reference
        if not all(isinstance(n, int) for n in (offset, *size, *strides)):
            raise TypeError("sizes that are not integers")
        if len(size) != len(strides) or not isinstance(key, str):
            raise TypeError("another number of sizes")
        return key, STORAGES[kind.name], offset, tuple(size), tuple(strides)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadablePickle("does not hold one tensor of 16 or 32 bits") from error


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous array, without those of dims of 1, which do not matter."""
    return tuple(math.prod(shape[i + 1 :]) for i, n in enumerate(shape) if n != 1)


def _read(span: Span, allowed: tuple[str, ...] | None) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return the value of data.pkl, and where each entry is: (offset in the span, bytes)."""
    with _Window(span) as window, io.BufferedReader(window) as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                entries = {}
                for info in archive.infolist():
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise UnreadablePickle("is compressed, as torch.save never does")
                    name = info.filename.partition("/")[2]
                    entries[name] = (_data_start(opened, info), info.file_size)
                    if sum(entries[name]) > min(span.length, _size(span)):
                        raise UnreadablePickle(f"ends before its entry {name}")
                _check_order(opened, entries)
                data = _bytes(opened, *entries["data.pkl"])
        except UnreadablePickle:
            raise
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, *DAMAGE) as error:
            raise UnreadablePickle(f"is not what torch.save writes ({error})") from error
    return read_pickle(data, allowed), entries


def _size(span: Span) -> int:
    """The bytes that the file has from the span's start, which a damaged index may overstate."""
    return span.file.stat().st_size - span.offset


def _data_start(opened: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where an entry's bytes begin: behind its name and the extra field."""
    header = _bytes(opened, info.header_offset, _LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
        raise UnreadablePickle("has a damaged header")
    lengths = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return info.header_offset + _LOCAL_HEADER + sum(lengths)


def _check_order(opened: BinaryIO, entries: dict[str, tuple[int, int]]) -> None:
    if "byteorder" in entries and _bytes(opened, *entries["byteorder"]) != b"little":
        raise UnreadablePickle("is not little-endian")


def _bytes(opened: BinaryIO, offset: int, length: int) -> bytes:
    if length > MAX_BYTES:
        raise UnreadablePickle(f"has an entry of {length} bytes")
    opened.seek(offset)
    return opened.read(length)
