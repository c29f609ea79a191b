"""The places of a file where an expression without a fixed order is used in order."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.meta.unordered import (
    FUNCTIONS,
    LOSE,
    OF_SET,
    OPERATORS,
    OTHER_METHODS,
    SET,
    SET_METHODS,
    Found,
    Package,
    Scope,
    all_nodes,
    kind_of,
    last_name,
    parsed,
    parts,
)

#: Functions and fields by which no two different entries of a set are equal.
DISTINCT = {"str", "repr", "int", "id", "path"}

#: Nodes with names of their own.
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def package_of(files: dict[str, str]) -> Package:
    """The declarations of a package's files.

    Args:     files: dotted name of a module -> its text.
    """
    package = Package()
    for module, source in files.items():
        package.add(module, parsed(source))
    return package


def disorder(source: str, module: str = "module", package: Package | None = None) -> list[Found]:
    """Lines and expressions of a file that use in order what has none."""
    package = package or package_of({module: source})
    tree = parsed(source)
    parents = {child: node for node in all_nodes(tree) for child in parts(node)}
    scope = Scope(package, module, {}, parents).inner(tree)
    return sorted(set(_within(tree, scope)))


def _within(of: ast.AST, scope: Scope) -> Iterator[Found]:
    for node in parts(of):
        if isinstance(node, ast.expr) and scope.kind(node) == SET and not _loses(node, scope):
            yield Found(node.lineno, ast.unparse(node))
        if isinstance(node, ast.Call) and last_name(node.func) == "hash":
            yield Found(node.lineno, ast.unparse(node))
        yield from _within(node, scope.inner(node) if type(node) in SCOPES else scope)


def _loses(node: ast.expr, scope: Scope) -> bool:
    """Whether the surroundings of an unordered expression use none of its order."""
    parent = scope.parents[node]
    if isinstance(parent, ast.expr) and scope.kind(parent) == SET:
        return True  # the larger expression is looked at instead
    match parent:
        case ast.Compare() | ast.UnaryOp() | ast.BoolOp() | ast.Expr():
            return True
        case ast.SetComp() | ast.ListComp() | ast.GeneratorExp():  # a set in each entry
            return True
        case ast.Attribute(attr=name):
            return name in SET_METHODS | OTHER_METHODS
        case ast.BinOp(op=op):  # with what is not known to be a set
            return isinstance(op, OPERATORS)
        case ast.Call(args=args) if node in args:
            return _call_loses(parent, args.index(node), scope)
        case ast.keyword():
            call = scope.parents[parent]
            return isinstance(call, ast.Call) and _takes_set(call, parent.arg or "", scope)
        case ast.Starred():
            around = scope.parents[parent]
            return isinstance(around, ast.Set)
        case ast.Assign(targets=targets):
            return not any(isinstance(t, ast.Tuple | ast.List) and len(t.elts) > 1 for t in targets)
        case ast.AnnAssign() | ast.NamedExpr():
            return True
        case ast.AugAssign(op=op):
            return isinstance(op, OPERATORS) or parent.target is node
        case ast.For() | ast.comprehension():
            return _part_loses(node, parent, scope)
        case ast.If() | ast.While() | ast.IfExp() | ast.Match():
            return True
        case ast.Assert(test=test):
            return test is node
        case ast.Return():
            return _returns_set(parent, scope)
        case ast.Dict() | ast.DictComp() | ast.Tuple() | ast.List():
            return True
        case ast.arguments():
            return True
        case ast.Subscript(value=value):
            return value is not node or OF_SET.match(ast.unparse(parent)) is not None
    return False


def _part_loses(node: ast.expr, parent: ast.AST, scope: Scope) -> bool:
    """Of a loop: conditions use no order, and a set, list or generator is looked at itself."""
    if isinstance(parent, ast.For):
        return parent.iter is not node
    assert isinstance(parent, ast.comprehension)
    return parent.iter is not node or not isinstance(scope.parents[parent], ast.DictComp)


def _call_loses(call: ast.Call, place: int, scope: Scope) -> bool:
    name = last_name(call.func)
    keys = [k.value for k in call.keywords if k.arg == "key"]
    if name in LOSE:
        return all(map(_tells_apart, keys))
    if name in OTHER_METHODS | SET_METHODS and isinstance(call.func, ast.Attribute):
        return True
    if name == "sum":
        return _counts(call.args[0])
    return _takes_set(call, place, scope)


def _tells_apart(key: ast.expr) -> bool:
    """Whether a sort key has another value for each entry: it holds the entry, or its id."""
    if not isinstance(key, ast.Lambda):
        return last_name(key) in DISTINCT
    entry, values = key.args.args[0].arg, [key.body]
    if isinstance(key.body, ast.Tuple):
        values = key.body.elts
    return any(last_name(value) in DISTINCT | {entry} for value in values)


def _counts(summed: ast.expr) -> bool:
    """Whether a sum is one of integers, whose order does not matter."""
    if not isinstance(summed, ast.GeneratorExp):
        return False
    return isinstance(summed.elt, ast.Constant | ast.Compare) or last_name(
        summed.elt.func if isinstance(summed.elt, ast.Call) else summed.elt
    ) in ("len", "st_size")


def _takes_set(call: ast.Call, argument: int | str, scope: Scope) -> bool:
    """Whether what is called declares this argument, by place or name, as a set."""
    package = scope.package
    called = package.functions.get(package.resolved(f"{scope.module}.{ast.unparse(call.func)}"))
    if isinstance(called, ast.ClassDef):
        fields = {
            n.target.id: kind_of(n.annotation)
            for n in called.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        made = [n for n in called.body if isinstance(n, FUNCTIONS) and n.name == "__init__"]
        if not made:
            names = list(fields)
            name = names[argument] if isinstance(argument, int) else argument
            return fields.get(name) == SET
        return any(_declares(one, argument, bound=True) for one in made)
    if isinstance(called, FUNCTIONS):
        return _declares(called, argument, bound=False)
    if isinstance(call.func, ast.Attribute):
        methods = package.methods.get(call.func.attr, [])
        return bool(methods) and all(_declares(m, argument, bound=True) for m in methods)
    if isinstance(call.func, ast.Name):  # a parameter that is a function, or one within another
        inner = [f for f in scope.parents if isinstance(f, FUNCTIONS) and f.name == call.func.id]
        inner += _assigned(call.func.id, scope)
        declared = bool(inner) and all(_declares(f, argument, bound=False) for f in inner)
        return declared or _is_callable_of_sets(call.func.id, call, scope)
    return False


def _assigned(name: str, scope: Scope) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The package's functions in what the file assigns to a name, such as partial(f, ...)."""
    values = (
        n.value
        for n in scope.parents
        if isinstance(n, ast.Assign) and name in map(last_name, n.targets)
    )
    dotted = (ast.unparse(n) for v in values for n in all_nodes(v) if last_name(n))
    found = (
        scope.package.functions.get(scope.package.resolved(f"{scope.module}.{d}")) for d in dotted
    )
    return [f for f in found if isinstance(f, FUNCTIONS)]


def _is_callable_of_sets(name: str, node: ast.AST, scope: Scope) -> bool:
    """Whether an argument of the surrounding function is annotated as a function of sets."""
    while not isinstance(node, (*FUNCTIONS, ast.Module)):
        node = scope.parents[node]
    given = [a for a in all_nodes(node) if isinstance(a, ast.arg) and a.arg == name]
    return any(re.search(r"Callable\[\[\w*[sS]et\[", ast.unparse(a)) for a in given)


def _declares(of: ast.FunctionDef | ast.AsyncFunctionDef, argument: int | str, bound: bool) -> bool:
    given = [*of.args.posonlyargs, *of.args.args]
    static = any(last_name(d) == "staticmethod" for d in of.decorator_list)
    given = given[1:] if bound and not static else given
    named = {a.arg: a.annotation for a in (*given, *of.args.kwonlyargs)}
    if isinstance(argument, int):
        return argument < len(given) and kind_of(given[argument].annotation) == SET
    return kind_of(named.get(argument)) == SET


def _returns_set(node: ast.AST, scope: Scope) -> bool:
    while not isinstance(node, FUNCTIONS):
        node = scope.parents[node]
    return kind_of(node.returns) == SET


def files_of(package: Path, root: Path) -> dict[str, Path]:
    """Dotted name -> file, of a package's modules."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found
