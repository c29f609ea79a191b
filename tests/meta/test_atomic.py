"""Files are replaced in one way, and paths become absolute in one: `atomic`, `paths.absolute`."""

import ast
from pathlib import Path

from tests.meta.test_packages import nodes_of

PACKAGE = Path(__file__).resolve().parents[2] / "jaxpar"

#: Calls that replace or move a file, or read the umask for that, by module and name.
FORBIDDEN = {
    *(("os", name) for name in ("replace", "rename", "renames", "link", "umask", "fsync")),
    ("shutil", "move"),
    *(("tempfile", name) for name in ("NamedTemporaryFile", "mkstemp", "mktemp")),
}

#: Files that may do so, and why.
EXCEPTIONS = {
    "runtime/files/atomic.py": "the one way",
    "memory_checkpoint/slots.py": "names of files in memory, which no power failure survives",
    "memory_checkpoint/server.py": "the same",
    "memory_checkpoint/places.py": "the same",
    "checkpoint/integrity.py": "moves damaged checkpoints aside, perhaps to another disk",
}


def calls_of(text: str):
    """Yield the line and the name of each call that replaces a file."""
    for node in nodes_of(text):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, on = node.func.attr, node.func.value
        module = on.id if isinstance(on, ast.Name) else ""
        of_path = len(node.args) == 1 and not node.keywords and module != "dataclasses"
        if (module, name) in FORBIDDEN or (name in ("rename", "replace") and of_path):
            yield node.lineno, f"{module}.{name}"
        if name == "absolute" and not node.args:
            yield node.lineno, "Path.absolute"


def places_in(text: str) -> list[str]:
    return [name for _, name in calls_of(text)]


def test_the_lint_finds_every_way():
    ways = ("os.replace(a, b)", "os.rename(a, b)", "shutil.move(a, b)", "os.umask(0)")
    ways += ("a.rename(b)", "(a / 'x').replace(b)", "tempfile.mkstemp()", "Path(a).absolute()")
    assert all(places_in(way) for way in ways)
    others = ("'a'.replace('b', 'c')", "dataclasses.replace(cfg, a=1)", "absolute(path)")
    assert not any(places_in(other) for other in others)


def test_files_are_replaced_by_atomic_alone():
    found, used = [], set()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        for line, call in calls_of(file.read_text()):
            if name in EXCEPTIONS:
                used.add(name)
            else:
                found.append(f"{name}:{line} {call}")
    assert not found, "use jaxpar.runtime.files.atomic, or config.rules.paths.absolute"
    assert used == set(EXCEPTIONS)
