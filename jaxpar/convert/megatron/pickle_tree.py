"""Reads a pickle as a tree of values. Nothing is imported, called or unpickled.

A pickle is a program for a stack machine, which may name any function and call it. Here, a name
stays a `Named`, and a call a `Built`, whose reader decides what it means. Only the instructions
that PyTorch's own files need are known.

Source:   the Python library's `pickletools`, which parses instructions and documents each.
"""

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
