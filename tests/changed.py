"""Name the test files that a change can break: python -m tests.changed [BASE]

`make test CHANGED=1` runs them. A file depends on what it imports, wherever in the file; on modules
and commands that it names in a string, such as "jaxpar.train" or `call("train", ...)`; and on what
the fixtures that its tests take depend on. Changed are the files that differ from BASE, the commit
where this branch left origin/main, or HEAD without a remote; and those that git does not know yet.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxpar.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]

#: Files on which all tests depend.
ALL = re.compile(r"pyproject\.toml|tests/conftest\.py")

#: Functions whose first argument names a command.
CALLS = {"call", "read", "read_options"}


@functools.cache
def modules() -> dict[str, Path]:
    """The Python files of the package and the tests, by dotted name."""
    files = (file for top in ("jaxpar", "tests") for file in (ROOT / top).rglob("*.py"))
    return {name_of(file.relative_to(ROOT)): file for file in files}


def name_of(file: Path) -> str:
    """Dotted name of a file; a package's __init__.py has the package's name."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(module: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(modules()[module].read_text("utf-8"))


@functools.cache
def lazy() -> dict[str, dict[str, str]]:
    """The names that each package imports when they are first used, with their modules."""
    tables = {}
    for module, file in modules().items():
        for node in tree_of(module).body if file.name == "__init__.py" else []:
            match node:
                case ast.Assign(targets=[ast.Name(id="_MODULES")]):
                    tables[module] = ast.literal_eval(node.value)
    return tables


def imports(node: ast.AST, package: str) -> Iterator[str]:
    """The modules that one statement or expression names."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            yield from (f"{p}.{attribute}" for p in lazy() if p.rpartition(".")[2] == name)
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=base, names=names, level=level):
            above = package.split(".")[: package.count(".") + 2 - level] if level else []
            base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Constant(value=str(text)) if text.startswith(("jaxpar.", "tests.")):
            yield text.partition(":")[0]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if name in COMMANDS:
            if getattr(func, "id", getattr(func, "attr", "")) in CALLS:
                yield f"jaxpar.{name}"


def found(names: Iterable[str]) -> set[str]:
    """The modules among names of modules and of what is in them, with their packages."""
    known: set[str] = set()
    for name in names:
        while name and name not in modules():
            above, _, last = name.rpartition(".")
            name = lazy().get(above, {}).get(last) or above
        if f"{name}.__main__" in modules():
            known.add(f"{name}.__main__")
        while name:
            known.add(name)
            name = name.rpartition(".")[0]
    return known & modules().keys()


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """What a module's code names others by; of a package, without its tables of names."""
    tables = ("_MODULES", "__all__", "TYPE_CHECKING") if module in lazy() else ()
    tops = [n for n in tree_of(module).body if not any(word in ast.unparse(n) for word in tables)]
    kinds = {ast.Import, ast.ImportFrom, ast.Constant, ast.Call, ast.Attribute, ast.arg}
    return [node for top in tops for node in ast.walk(top) if type(node) in kinds]


@functools.cache
def imported(module: str) -> frozenset[str]:
    """The modules on which a module depends directly, without fixtures."""
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    names = {name for node in nodes_of(module) for name in imports(node, package)}
    return frozenset(found(names) - {module})


@functools.cache
def fixtures() -> dict[str, frozenset[str]]:
    """The modules on which each fixture depends, by its name: of what it uses, and it takes."""
    uses: dict[str, set[str]] = {}
    takes: dict[str, set[str]] = {}
    for module in [m for m in modules() if m == "tests.runs" or m.endswith(".conftest")]:
        bound: dict[str, set[str]] = {}
        for node in tree_of(module).body:
            for alias in getattr(node, "names", []) if isinstance(node, ast.stmt) else []:
                if isinstance(alias, ast.alias):
                    one = ast.Import([alias]) if isinstance(node, ast.Import) else node
                    of = found(n for n in imports(one, "tests") if n.endswith(alias.name))
                    bound[(alias.asname or alias.name).partition(".")[0]] = of
        for node in tree_of(module).body:
            if isinstance(node, ast.FunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                inner = (name for n in ast.walk(node) for name in imports(n, "tests"))
                uses[node.name] = found(inner).union(*(bound.get(name, set()) for name in names))
                takes[node.name] = names | {arg.arg for arg in node.args.args}
    closed = {}
    for name in uses:
        seen, left = set[str](), {name}
        while left:
            seen |= left
            left = {other for one in left for other in takes[one] & uses.keys()} - seen
        closed[name] = frozenset().union(*(uses[one] for one in seen))
    return closed


@functools.cache
def depends(module: str) -> frozenset[str]:
    """All modules on which a module depends, itself included."""
    direct = set[str]()
    if module.rpartition(".")[2].startswith("test_"):
        taken = (getattr(n, "arg", getattr(n, "value", None)) for n in nodes_of(module))
        words = {word for word in taken if isinstance(word, str)}
        direct = set().union(*(fixtures()[word] for word in words & fixtures().keys()))
    seen, left = set[str](), {module, *direct}
    while left:
        seen |= left
        left = {other for one in left for other in imported(one)} - seen
    return frozenset(seen)


def selected_by(changed: Iterable[str]) -> list[str]:
    """The test files that changed files can break, by their paths from the root."""
    files = [file for file in changed if (ROOT / file).exists() or file.endswith(".py")]
    tests = {name: f for name, f in modules().items() if f.name.startswith("test_")}
    if any(ALL.fullmatch(file) for file in files):
        return sorted(str(file.relative_to(ROOT)) for file in tests.values())
    touched, chosen = set[str](), set[str]()
    for file in map(Path, files):
        if file.suffix == ".py" and file.parts[0] in ("jaxpar", "tests"):
            touched.add(name_of(file))
        elif file.parts[0] in ("jaxpar", "tests"):  # data that a module beside or above it reads
            touched |= {m for m, f in modules().items() if f.parent == (ROOT / file).parent}
        else:  # configs, pages, scripts: the repository's own tests, and those that name it
            chosen |= {m for m in tests if m.startswith("tests.meta.")}
            said = file.stem if file.parts[0] == "configs" else file.name
            chosen |= {m for m, f in tests.items() if said in f.read_text("utf-8")}
    chosen |= {m for m in tests if depends(m) & touched}
    if touched:
        chosen |= {"tests.meta.test_packages", "tests.meta.test_docs", "tests.meta.test_names"}
    return sorted(str(tests[m].relative_to(ROOT)) for m in chosen & tests.keys())


def changed_since(base: str | None) -> list[str]:
    """The files that differ from a commit, and those that git does not know yet."""
    git = lambda *words: subprocess.run(  # noqa: E731
        ["git", *words], cwd=ROOT, text=True, capture_output=True
    ).stdout.split("\n")
    base = base or git("merge-base", "HEAD", "origin/main")[0] or "HEAD"
    listed = git("diff", "--name-only", base), git("ls-files", "--others", "--exclude-standard")
    return sorted({name for names in listed for name in names if name})


if __name__ == "__main__":
    print("\n".join(selected_by(changed_since(next(iter(sys.argv[1:]), None)))))
