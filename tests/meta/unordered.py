"""Where the order of a set, or of a folder's files, can reach a program, a file or a message.

The order of a set of strings depends on PYTHONHASHSEED, that of a folder on its file system:
processes of one run then trace different programs, and write different files. `disorder` follows
expressions without a fixed order within a file: sets, what iterates over them, annotated
parameters, fields and constants, functions of the package that return them. Each must end in
`sorted`, in another set, or where its order is lost (`len`, `in`, `any`, `min`).
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

SET, SETS = "set", "container of sets"

#: An annotation of a set, and of what holds sets.
OF_SET = re.compile(r"^(?:\w+\.)*(?:set|frozenset|Set|AbstractSet|MutableSet|Container)(?:\[|$)")
OF_SETS = re.compile(r"^(?:\w+\.)*(?:dict|defaultdict|Mapping|list|tuple|Sequence)\[.*")

#: Functions whose result has no fixed order if an argument has none.
KEEP = {"map", "filter", "list", "tuple", "iter", "enumerate", "zip", "reversed", "chain", "islice"}
KEEP |= {"from_iterable", "starmap", "product", "permutations", "combinations"}

#: Functions whose result does not depend on the order of their argument. `min` and `max` with a key
#: return the first of several equal ones, and a sum of floats is rounded in order.
LOSE = {"sorted", "len", "any", "all", "set", "frozenset", "bool", "isinstance", "min", "max"}
LOSE |= {"fsum", "cast"}

#: Methods of sets: those that return a set, and those that return none.
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference", "copy"}
OTHER_METHODS = {"add", "discard", "remove", "clear", "update", "isdisjoint", "issubset"}
OTHER_METHODS |= {"issuperset", "intersection_update", "difference_update", "set"}
OTHER_METHODS |= {"symmetric_difference_update", "close"}

#: What gives a folder's entries in the order of the file system.
LISTINGS = {"iterdir", "glob", "rglob", "iglob", "listdir", "scandir", "walk"}

#: Sets of the standard library and of JAX, by the last part of their names: fields, and functions.
FIELDS = {"varying", "device_set", "addressable_devices", "stdlib_module_names"}
RESULTS = {"sched_getaffinity"}

OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BINDING = {ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension}
CLOSED = {*FUNCTIONS, ast.Lambda, ast.ClassDef}
NO_PARTS = {ast.Constant, ast.Load, ast.Store, ast.Del, *ast.operator.__subclasses__()}
NO_PARTS |= {*ast.cmpop.__subclasses__(), *ast.boolop.__subclasses__()}
NO_PARTS |= {*ast.unaryop.__subclasses__()}


class Found(NamedTuple):
    """An expression whose order can reach something."""

    line: int
    text: str


@dataclasses.dataclass
class Package:
    """What the files of a package declare, by dotted name; fields and methods by their last name.

    A field or method counts as a set only if all of that name are.
    """

    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = dataclasses.field(
        default_factory=dict
    )
    members: dict[str, list[str | None]] = dataclasses.field(default_factory=dict)
    methods: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = dataclasses.field(
        default_factory=dict
    )
    imports: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, module: str, tree: ast.Module) -> None:
        """Read the declarations of one file."""
        self.imports |= {f"{module}.{n}": to for n, to in imports_of(tree).items()}
        for node in tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self.functions[f"{module}.{node.name}"] = node
        scope = Scope(self, module, {}, {})
        for name, kind in scope.bindings(tree).items():
            self.kinds[f"{module}.{name}"] = kind
        for node in all_nodes(tree):
            if isinstance(node, ast.ClassDef):
                self._add_members(node)

    def _add_members(self, of: ast.ClassDef) -> None:
        for node in of.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.members.setdefault(node.target.id, []).append(kind_of(node.annotation))
            elif isinstance(node, FUNCTIONS):
                self.members.setdefault(node.name, []).append(kind_of(node.returns))
                self.methods.setdefault(node.name, []).append(node)
        for inner in all_nodes(of):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Attribute):
                self.members.setdefault(inner.target.attr, []).append(kind_of(inner.annotation))

    def member(self, name: str) -> str | None:
        """The kind of the fields and methods of this name."""
        kinds = self.members.get(name, [None])
        return kinds[0] if len({*kinds}) == 1 else None

    def resolved(self, name: str) -> str:
        """The dotted name where something imported is declared."""
        for _ in range(8):  # a package may import it from its modules
            head, _, last = name.rpartition(".")
            if name in self.imports:
                name = self.imports[name]
            elif head in self.imports:
                name = f"{self.imports[head]}.{last}"
            else:
                break
        return name


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, of a file's imports."""
    found = {}
    for node in all_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            plain = [a for a in node.names if a.asname or "." not in a.name]
            found |= {a.asname or a.name: a.name for a in plain}
    return found


def kind_of(annotation: ast.expr | None) -> str | None:
    """What an annotation says: a set, a container of sets, or another thing."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return kind_of(annotation.left) or kind_of(annotation.right)
    text = ast.unparse(annotation)
    if OF_SET.match(text):
        return SET
    inner = annotation.slice if isinstance(annotation, ast.Subscript) else None
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    return SETS if OF_SETS.match(text) and kind_of(parts[-1]) == SET else None


@dataclasses.dataclass
class Scope:
    """A module or a function: the names that it knows as sets."""

    package: Package
    module: str
    names: dict[str, str]
    parents: dict[ast.AST, ast.AST]
    seen: dict[ast.expr, str | None] = dataclasses.field(default_factory=dict, init=False)

    def inner(self, of: ast.AST) -> "Scope":
        """The scope of a function or lambda within this one."""
        known = dict(self.names)
        if isinstance(of, (*FUNCTIONS, ast.Lambda)):
            arguments = [*of.args.posonlyargs, *of.args.args, *of.args.kwonlyargs]
            for each in arguments:
                known.pop(each.arg, None)
                if kind := kind_of(each.annotation):
                    known[each.arg] = kind
        bound = dataclasses.replace(self, names=known).bindings(of)
        return dataclasses.replace(self, names=known | bound)

    def bindings(self, of: ast.AST) -> dict[str, str]:
        """The names that statements of this scope bind to sets, by any of them."""
        found: dict[str, str] = {}
        for _ in range(3):  # a name may be bound from another that is bound below, in a loop
            looking = dataclasses.replace(self, names=self.names | found)
            before = dict(found)
            for node in bindings_within(of):
                for name, kind in looking.bound(node):
                    found.setdefault(name, kind)
            if found == before:
                break
        return found

    def bound(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Names and kinds that one statement binds."""
        match node:
            case ast.Assign(targets=targets, value=value) if kind := self.kind(value):
                yield from ((t.id, kind) for t in targets if isinstance(t, ast.Name))
                stored = [t.value for t in targets if isinstance(t, ast.Subscript)]
                yield from ((t.id, SETS) for t in stored if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                kind = kind_of(annotation) or (self.kind(value) if value else None)
                yield from [(name, kind)] if kind else []
            case ast.NamedExpr(target=ast.Name(id=name), value=value) if kind := self.kind(value):
                yield name, kind
            case ast.AugAssign(target=ast.Name(id=name), value=value, op=op):
                if isinstance(op, ast.Add) and self.kind(value) == SET:
                    yield name, SET
            case (
                ast.For(target=target, iter=iterated)
                | ast.comprehension(target=target, iter=iterated)
            ):
                yield from ((name, SET) for name in self._of_each(target, iterated))

    def _of_each(self, target: ast.expr, iterated: ast.expr) -> Iterator[str]:
        """The loop variable that is a set, over a container of sets."""
        match target, iterated:
            case ast.Name(id=name), _ if self.kind(iterated) == SETS:
                yield from [name] if not isinstance(iterated, ast.Name) else []
            case ast.Tuple(elts=[_, ast.Name(id=name)]), ast.Call(
                func=ast.Attribute(value=of, attr="items")
            ) if self.kind(of) == SETS:
                yield name

    def kind(self, node: ast.expr) -> str | None:
        """Whether an expression is a set or without order, a container of sets, or neither."""
        if node not in self.seen:
            self.seen[node] = self._kind(node)
        return self.seen[node]

    def _kind(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                if name in self.names:
                    return self.names[name]
                dotted = self.package.resolved(f"{self.module}.{name}")
                return self.package.kinds.get(dotted)
            case ast.Call():
                return self._kind_of_call(node)
            case ast.Set() | ast.SetComp():
                return SET
            case ast.Attribute(attr=name):
                dotted = self.package.resolved(f"{self.module}.{ast.unparse(node)}")
                if dotted in self.package.kinds:
                    return self.package.kinds[dotted]
                return SET if name in FIELDS else self.package.member(name)
            case ast.BinOp(left=left, op=op, right=right):
                both = (self.kind(left), self.kind(right))
                views = isinstance(op, OPERATORS) and (is_view(left) or is_view(right))
                plus = (*OPERATORS, ast.Add)
                return SET if views or (SET in both and isinstance(op, plus)) else None
            case ast.IfExp(body=body, orelse=other):
                return self.kind(body) or self.kind(other)
            case ast.BoolOp(values=values):
                return next(filter(None, map(self.kind, values)), None)
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.kind(value)
            case ast.GeneratorExp(generators=over) | ast.ListComp(generators=over):
                inner = self.inner(node)
                return SET if any(inner.kind(g.iter) == SET for g in over) else None
            case ast.DictComp(value=value):
                return SETS if self.inner(node).kind(value) == SET else None
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                stars = [e for e in elements if isinstance(e, ast.Starred)]
                return SET if any(self.kind(e) == SET for e in stars) else None
            case ast.Dict(values=values):
                return SETS if values and all(self.kind(v) == SET for v in values) else None
            case ast.Subscript(value=value, slice=at):
                whole = self.kind(value)
                if whole == SETS or (whole == SET and isinstance(at, ast.Slice)):
                    return SET
                return None
        return None

    def _kind_of_call(self, call: ast.Call) -> str | None:
        name, of = last_name(call.func), call.func
        whole = self.kind(of.value) if isinstance(of, ast.Attribute) else None
        if isinstance(of, ast.Subscript) and OF_SET.match(ast.unparse(of)):  # set[int]()
            return SET
        if name in ("set", "frozenset") and isinstance(of, ast.Name):
            return SET
        if name in SET_METHODS and whole == SET:
            return SET
        if whole == SETS and name in ("get", "setdefault", "pop"):
            return SET
        if whole == SETS and name == "values":
            return SETS
        if name in ("setdefault", "get") and len(call.args) == 2 and self.kind(call.args[1]) == SET:
            return SET
        if name == "defaultdict" and call.args and last_name(call.args[0]) == "set":
            return SETS
        if name in LISTINGS and not (name == "walk" and ast.unparse(of) == "ast.walk"):
            return SET
        if name in RESULTS:
            return SET
        if name in KEEP:
            return SET if any(self.kind(a) == SET for a in call.args) else None
        if isinstance(of, ast.Name) and of.id in self.names:
            return None
        declared = self.package.functions.get(
            self.package.resolved(f"{self.module}.{ast.unparse(of)}")
        )
        if isinstance(declared, FUNCTIONS):
            return kind_of(declared.returns)
        return self.package.member(name) if isinstance(of, ast.Attribute) and not declared else None


def is_view(node: ast.expr) -> bool:
    """Whether it is `d.keys()` or `d.items()`, which are in order, but not after `&`, `|`, `-`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="keys" | "items"), args=[]):
            return True
    return False


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@functools.cache
def parsed(source: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(source)


@functools.cache
def parts(node: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes directly below one, without the names of contexts and operators."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        found.extend(value if isinstance(value, list) else [value])
    return tuple(n for n in found if isinstance(n, ast.AST) and type(n) not in NO_PARTS)


@functools.cache
def all_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a tree, parents before their parts."""
    found = [tree]
    for node in found:
        found.extend(parts(node))
    return tuple(found)


@functools.cache
def bindings_within(of: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a scope that bind names, but those of functions and classes within it."""
    found, left = [], list(parts(of))
    while left:
        node = left.pop()
        if type(node) in BINDING:
            found.append(node)
        if type(node) not in CLOSED:
            left.extend(parts(node))
    return tuple(found)
