"""What scripts and notebooks import from the package is there. (Types are checked in jaxpar/.)"""

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def texts() -> Iterator[tuple[str, str]]:
    """Name and code of each script, and of each cell of a notebook."""
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text("utf-8")
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            lines = cell["source"] if cell["cell_type"] == "code" else []
            yield path.name, "".join(line for line in lines if not line.startswith(("%", "!")))


def missing(text: str) -> list[str]:
    """The names that code imports from jaxpar, and that are not there."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                modules = [(name.name, "") for name in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                modules = [(module, name.name) for name in names]
            case _:
                continue
        found += [f"{m}.{name}" for m, name in modules if m.split(".")[0] == "jaxpar"]
    return [name for name in found if not is_there(name.rstrip("."))]


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something within one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return bool(module) and is_there(module) and hasattr(importlib.import_module(module), last)
    return True


def test_imports_are_there():
    wrong = {name: found for name, text in texts() if (found := missing(text))}
    assert not wrong


def test_an_import_that_is_not_there_is_seen():
    text = "from jaxpar.stores.lease import NAME, SURELY_OLD\nimport jaxpar.nowhere, json"
    assert missing(text) == ["jaxpar.stores.lease.SURELY_OLD", "jaxpar.nowhere."]
