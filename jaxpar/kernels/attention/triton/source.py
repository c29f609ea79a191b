"""Kernels as source code of Triton, which `jax_triton` compiles and calls.

JAX traces a kernel's body, and each of its operations is one line of source: Pallas' interpreter
and Triton run the same body. `PRIMITIVES` lists the operations that kernels may use.
"""

import functools
import hashlib
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Literal, Primitive

#: An instruction in assembly for each element of its operands. Only in compiled kernels.
assembly_p = Primitive("assembly")


@assembly_p.def_abstract_eval
def _assembly_abstract(x, *_, **__):
    return x


#: The header of a file of source.
HEADER = """import triton
import triton.language as tl


@triton.jit
def {name}({parameters}):
"""

TYPES = {
    "bool": "int1",
    **{name: name for name in ("int32", "int64", "uint32", "float32", "float16", "bfloat16")},
}

#: Infix operators, by primitive.
OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"shift_left": "<<", "shift_right_arithmetic": ">>"},
}

#: Functions of elements, by primitive.
FUNCTIONS = {"exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log"}


def source_of(name: str, jaxpr: Any) -> str:
    """Write a kernel whose body is a jaxpr of references to whole arrays.

    Raises:   NotImplementedError for an operation that is not in `PRIMITIVES`.
    """
    lines = _Lines(jaxpr)
    parameters = ", ".join(lines.names[v] for v in jaxpr.invars)
    lines.run(jaxpr)
    return HEADER.format(name=name, parameters=parameters) + "\n".join(lines.text or ["    pass"])


@functools.cache
def compiled(source: str, name: str) -> Any:
    """Return the function of Triton's that a source defines. Triton reads its text by its file."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    there: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, file, "exec"), there)
    return there[name]


class _Lines:
    """The lines of a kernel, and the names of its variables."""

    def __init__(self, jaxpr):
        self.text: list[str] = []
        self.names: dict[Any, str] = {}
        self.indent, self.count = "    ", 0
        for ref in jaxpr.invars:
            self.names[ref] = self.new()

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, line: str) -> None:
        self.text.append(self.indent + line)

    def let(self, expression: str) -> str:
        """Assign an expression to a new variable."""
        name = self.new()
        self.add(f"{name} = {expression}")
        return name

    def read(self, x: Any) -> str:
        """Return a variable's name, or a literal number."""
        if not _is_literal(x):
            return self.names[x]
        if jnp.issubdtype(x.aval.dtype, jnp.floating):
            number = float(x.val)
            return repr(number) if math.isfinite(number) else f'float("{number}")'
        return repr(int(x.val))

    def value(self, x: Any) -> str:
        """Return the name of a tensor, also for a literal."""
        if not _is_literal(x):
            return self.names[x]
        return self.let(f"tl.full([], {self.read(x)}, {_type(x.aval.dtype)})")

    def inline(self, jaxpr, arguments: Sequence[str]) -> list[str]:
        """Write the lines of a nested jaxpr. Returns the names of its results."""
        self.names |= dict(zip(jaxpr.invars, arguments, strict=True))
        self.run(jaxpr)
        return [self.value(x) for x in jaxpr.outvars]

    def run(self, jaxpr) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name not in PRIMITIVES:
                raise NotImplementedError(
                    f"a Triton kernel uses {name}, for which `PRIMITIVES` has no line of source"
                )
            found = PRIMITIVES[name](self, eqn)
            if found is not None:
                found = [self.let(found)] if isinstance(found, str) else found
                self.names |= dict(zip(eqn.outvars, found, strict=True))


def _is_literal(x: Any) -> bool:
    return isinstance(x, Literal)


def _type(dtype) -> str:
    return f"tl.{TYPES[jnp.dtype(dtype).name]}"


def _operator(symbol: str) -> Callable[[_Lines, Any], str]:
    return lambda lines, eqn: f" {symbol} ".join(map(lines.read, eqn.invars))


def _function(name: str, **options: str) -> Callable[[_Lines, Any], str]:
    more = [f"{key}={value}" for key, value in options.items()]
    return lambda lines, eqn: f"{name}({', '.join([*map(lines.read, eqn.invars), *more])})"


def _nested(lines: _Lines, eqn):
    closed = eqn.params["jaxpr"]
    return lines.inline(closed.jaxpr, [lines.value(x) for x in eqn.invars])


def _reduce(name: str) -> Callable[[_Lines, Any], str]:
    def line(lines, eqn):
        axes, (x,) = eqn.params["axes"], eqn.invars
        axis = axes[0] if len(axes) == 1 else None
        assert axis is not None or len(axes) == len(x.aval.shape)
        return f"tl.{name}({lines.read(x)}, axis={axis})"

    return line


def _broadcast(lines: _Lines, eqn) -> str:
    shape, (x,) = list(eqn.params["shape"]), eqn.invars
    if not x.aval.shape:
        return f"tl.full({shape}, {lines.read(x)}, {_type(x.aval.dtype)})"
    kept = eqn.params["broadcast_dimensions"]
    at = ", ".join(":" if axis in kept else "None" for axis in range(len(shape)))
    return f"tl.broadcast_to({lines.read(x)}[{at}], {shape})"


def _iota(lines: _Lines, eqn) -> str:
    shape, axis = list(eqn.params["shape"]), eqn.params["dimension"]
    at = ", ".join(":" if i == axis else "None" for i in range(len(shape)))
    return f"tl.broadcast_to(tl.arange(0, {shape[axis]})[{at}], {shape})"


def _dot(lines: _Lines, eqn) -> str:
    assert eqn.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    exact = eqn.params["precision"] is not None and eqn.invars[0].aval.dtype == jnp.float32
    how = "ieee" if exact else "tf32"
    return _function("tl.dot", input_precision=f'"{how}"', out_dtype="tl.float32")(lines, eqn)


def _assembly(lines: _Lines, eqn) -> str:
    text, constraints, pack = (eqn.params[key] for key in ("text", "constraints", "pack"))
    dtype, args = _type(eqn.outvars[0].aval.dtype), ", ".join(map(lines.read, eqn.invars))
    how = f"[{args}], dtype={dtype}, is_pure=True, pack={pack}"
    return f'tl.inline_asm_elementwise("{text}", "{constraints}", {how})'


def _address(lines: _Lines, ref, transforms) -> tuple[str, str]:
    """Write the addresses of elements, and which of them are inside of the array, if not all."""
    shape = ref.aval.shape
    indices = transforms[0].indices if transforms else [pl.Slice(0, n) for n in shape]
    slices = [at for at in indices if isinstance(at, pl.Slice)]
    wide = ".to(tl.int64)" if math.prod(shape) >= 1 << 31 else ""
    address, mask, axis = lines.read(ref), [], 0

    def move(index, stride: int, wide: str = wide) -> None:
        nonlocal address
        if index.isdecimal():
            index, stride, wide = str(int(index) * stride), 1, ""
        if index != "0":
            by = f" * {stride}" if stride != 1 else ""
            address = lines.let(f"{address} + {index}{wide}{by}")

    for i, (at, size) in enumerate(zip(indices, shape, strict=True)):
        stride = math.prod(shape[i + 1 :])
        if isinstance(at, pl.Slice):
            assert at.stride == 1
            move(str(at.start) if isinstance(at.start, int) else lines.read(at.start), stride)
            spread = ", ".join(":" if j == axis else "None" for j in range(len(slices)))
            move(f"tl.arange(0, {at.size})[{spread}]", stride, "")
            axis += 1
            continue
        index = str(at) if isinstance(at, int) else lines.read(at)
        move(index, stride)
        if getattr(getattr(at, "aval", None), "shape", ()):
            assert not slices, "arrays of indices are vectors, without slices"
            mask.append(f"({index} < {size})")
    return address, " & ".join(mask)


def _load(lines: _Lines, eqn) -> str:
    ref, *rest = eqn.invars
    address, mask = _address(lines, ref, jax.tree.unflatten(eqn.params["tree"], rest))
    assert not mask, "loads have no mask"
    return f"tl.load({address})"


def _store(lines: _Lines, eqn) -> None:
    ref, value, *rest = eqn.invars
    address, mask = _address(lines, ref, jax.tree.unflatten(eqn.params["tree"], rest))
    lines.add(f"tl.store({address}, {lines.read(value)}{mask and f', mask={mask}'})")


def _while(lines: _Lines, eqn) -> list[str]:
    p, names = eqn.params, [lines.value(x) for x in eqn.invars]
    cond, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    of_cond = names[: p["cond_nconsts"]]
    of_body, start = names[len(of_cond) :][: p["body_nconsts"]], names[len(of_cond) :]
    carry = [lines.let(x) for x in start[len(of_body) :]]
    counted = _is_counted(cond, body, len(of_body))
    outer, inner = lines.indent, lines.indent + "    "
    if counted:
        first, end = carry[:2]
        carry[0] = lines.new()
        lines.add(f"for {carry[0]} in range({first}, {end}):")
    else:
        (goes_on,) = lines.inline(cond, [*of_cond, *carry])
        lines.add(f"while {goes_on}:")
    lines.indent = inner
    made = lines.inline(body, [*of_body, *carry])
    moved = list(zip(carry, made, strict=True))[2 if counted else 0 :]
    moved = [(name, lines.let(x) if x in carry else x) for name, x in moved if x != name]
    for name, x in moved:
        lines.add(f"{name} = {x}")
    if not counted:
        lines.add(f"{goes_on} = {lines.inline(cond, [*of_cond, *carry])[0]}")
    elif not moved:
        lines.add("pass")
    lines.indent = outer
    return carry


def _is_counted(cond, body, consts: int) -> bool:
    """Return whether a loop counts its first carried number up to its second: a `for` in Triton,
    whose loads are pipelined."""
    i, end = body.invars[consts : consts + 2]
    test = cond.eqns[0] if len(cond.eqns) == 1 else None
    steps = [e for e in body.eqns if e.outvars[0] is body.outvars[0]]
    return (
        test is not None
        and test.primitive.name == "lt"
        and list(test.invars) == list(cond.invars[:2])
        and body.outvars[1] is end
        and [e.primitive.name for e in steps] == ["add"]
        and steps[0].invars[0] is i
        and _is_literal(steps[0].invars[1])
        and steps[0].invars[1].val == 1
    )


#: What a kernel may use: its primitives, and how each is written.
PRIMITIVES: dict[str, Callable[[_Lines, Any], str | list[str] | None]] = {
    **{name: _operator(symbol) for name, symbol in OPERATORS.items()},
    **{name: _function(function) for name, function in FUNCTIONS.items()},
    **{name: _reduce(name.removeprefix("reduce_")) for name in ("reduce_max", "reduce_sum")},
    "div": lambda lines, eqn: _operator(
        "//" if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer) else "/"
    )(lines, eqn),
    "rem": _operator("%"),
    "neg": lambda lines, eqn: f"-{lines.read(eqn.invars[0])}",
    "max": _function("tl.maximum", propagate_nan="tl.PropagateNan.ALL"),
    "min": _function("tl.minimum", propagate_nan="tl.PropagateNan.ALL"),
    "select_n": lambda lines, eqn: "tl.where({0}, {2}, {1})".format(*map(lines.read, eqn.invars)),
    "convert_element_type": lambda lines, eqn: (
        f"{lines.value(eqn.invars[0])}.to({_type(eqn.params['new_dtype'])})"
    ),
    "bitcast_convert_type": lambda lines, eqn: (
        f"{lines.value(eqn.invars[0])}.to({_type(eqn.params['new_dtype'])}, bitcast=True)"
    ),
    "broadcast_in_dim": _broadcast,
    "broadcast_to": lambda lines, eqn: (
        f"tl.full({list(eqn.params['shape'])}, {lines.read(eqn.invars[0])}, tl.int32)"
    ),
    "reshape": lambda lines, eqn: (
        f"tl.reshape({lines.read(eqn.invars[0])}, {list(eqn.params['new_sizes'])})"
    ),
    "transpose": lambda lines, eqn: f"tl.trans({lines.read(eqn.invars[0])})",
    "iota": _iota,
    "cumsum": lambda lines, eqn: (
        f"tl.cumsum({lines.read(eqn.invars[0])}, axis={eqn.params['axis']})"
    ),
    "dot_general": _dot,
    "assembly": _assembly,
    "program_id": lambda lines, eqn: f"tl.program_id({eqn.params['axis']})",
    "get": _load,
    "swap": _store,
    "while": _while,
    "jit": _nested,
}
