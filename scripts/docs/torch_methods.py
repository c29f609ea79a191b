"""Copy methods of components into jaxpar/convert/torch_model.py, which imports nothing of jaxpar.

python scripts/docs/torch_methods.py --write
"""

import argparse
import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxpar"
FILE = PACKAGE / "convert" / "torch_model.py"

#: Each class in PyTorch, the file and the class whose method it has, and the method.
METHODS = {"TorchAttention": (PACKAGE / "components" / "attention.py", "Attention", "attending")}


def lines_of(text: str, cls: str, method: str) -> slice:
    """Return which lines of a file are a method of a class."""
    body = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == cls)
    found = next(n for n in body.body if isinstance(n, ast.FunctionDef) and n.name == method)
    return slice(found.lineno - 1, found.end_lineno)


def page() -> str:
    """Return the file with the methods as they are in the components."""
    text = FILE.read_text("utf-8")
    for copy, (file, cls, method) in METHODS.items():
        source, lines = file.read_text("utf-8"), text.splitlines(keepends=True)
        of = source.splitlines(keepends=True)[lines_of(source, cls, method)]
        lines[lines_of(text, copy, method)] = of
        text = "".join(lines)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        FILE.write_text(page(), "utf-8")
    else:
        print(page(), end="")
