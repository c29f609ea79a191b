"""The map of the code in docs/code.md: python scripts/docs/code_map.py [--write]

Made of the first sentence of each package's docstring, in an order by their MAY_IMPORT. Printed;
with --write, written between the markers of the page.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.docs.generated_table import run  # noqa: E402

PACKAGE = ROOT / "jaxpar"

PAGE, MARK = "code.md", "packages"


def sentence(folder: Path) -> str:
    """The first sentence of a package's docstring, without its period."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
    return first.replace("|", "\\|").removesuffix(".")


def may_import(folder: Path) -> tuple[str, ...] | None:
    """The packages that a package may import; None for a folder in one."""
    for node in ast.parse((folder / "__init__.py").read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MAY_IMPORT")]):
                return ast.literal_eval(node.value)
    return None


def from_the_top(packages: dict[str, tuple[str, ...]]) -> list[str]:
    """Packages in an order in which each comes before those that it imports."""
    level: dict[str, int] = {}
    while len(level) < len(packages):
        for name, below in packages.items():
            if name not in level and all(package in level for package in below):
                level[name] = 1 + max((level[package] for package in below), default=0)
    return sorted(packages, key=lambda name: (-level[name], name))


def row(folder: Path) -> str:
    """The row of a package."""
    name = folder.relative_to(PACKAGE).as_posix()
    return f"| [`{name}/`](../jaxpar/{name}) | {sentence(folder)} |\n"


def table() -> str:
    """The table."""
    folders = sorted(file.parent for file in PACKAGE.rglob("*/__init__.py"))
    packages = {
        ".".join(folder.relative_to(PACKAGE).parts): allowed
        for folder in folders
        if (allowed := may_import(folder)) is not None
    }
    rows = (row(PACKAGE.joinpath(*name.split("."))) for name in from_the_top(packages))
    return "| package | what it is for |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    run(__doc__, PAGE, MARK, table)
