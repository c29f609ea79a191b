"""The map of the code, docs/code.md: python scripts/docs/code_map.py [--write]

Made of the docstrings of packages, files and scripts, and of each package's MAY_IMPORT. Printed;
with --write, written to the page.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "code.md"
PACKAGE = ROOT / "jaxpar"

HEAD = (
    "# Map of the code\n\n"
    "Written by `python scripts/docs/code_map.py --write` from the docstrings.\n\n"
    "- A folder directly under `jaxpar/` is a **package**. Its `__init__.py` has a sentence about "
    "it and names, in `MAY_IMPORT`, the packages that it may import; "
    "`tests/meta/test_packages.py` checks every import.\n"
    "- A file in the root of `jaxpar/` is a **command**, `python -m jaxpar.NAME` or "
    "`jaxpar NAME`; `commands.py` has their table.\n"
    "- `tools/` holds packages that train nothing. No package outside imports them.\n"
    "- Packages are listed from the top down: each imports only packages below it.\n\n"
    "[The tour](tour.md) follows one training step through these files.\n"
)

BESIDE = (
    "\n## Around the package\n\n| folder | what |\n|---|---|\n"
    "| `configs/` | configs: Python files with a `get_config()` |\n"
    "| `tests/` | a folder for each package; `meshes/` compares meshes with the plain model, "
    "`e2e/` runs programs, `meta/` checks packages and pages |\n"
    "| `docs/`, `mkdocs.yml` | the pages; `make docs` builds the site |\n"
)


def sentence(file: Path) -> str:
    """The first sentence of a file's docstring, without its period."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
    return first.partition(": python ")[0].removesuffix(".")


def may_import(package: Path) -> tuple[str, ...]:
    """The packages that a package may import."""
    for node in ast.parse((package / "__init__.py").read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MAY_IMPORT")]):
                return ast.literal_eval(node.value)
    raise ValueError(f"{package} has no MAY_IMPORT")


def from_the_top(packages: dict[str, tuple[str, ...]]) -> list[str]:
    """Packages in an order in which each comes before those that it imports."""
    level: dict[str, int] = {}
    while len(level) < len(packages):
        for name, below in packages.items():
            if name not in level and all(package in level for package in below):
                level[name] = 1 + max((level[package] for package in below), default=0)
    return sorted(packages, key=lambda name: (-level[name], name))


def table(head: str, rows: list[tuple[str, str]]) -> str:
    """A table of files."""
    return f"\n| {head} | what |\n|---|---|\n" + "".join(f"| `{a}` | {b} |\n" for a, b in rows)


def page() -> str:
    """The page."""
    commands = [(f.name, sentence(f)) for f in sorted(PACKAGE.glob("*.py")) if f.stem != "__init__"]
    parts = [HEAD, "\n## Commands\n", table("in `jaxpar/`", commands)]
    files = [*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("tools/*/__init__.py")]
    folders = {str(f.parent.relative_to(PACKAGE)): f.parent for f in files}
    del folders["tools"]
    packages = {
        name: tuple(package.replace(".", "/") for package in may_import(folder))
        for name, folder in folders.items()
    }
    for name in from_the_top(packages):
        folder = folders[name]
        allowed = ", ".join(f"`{package}/`" for package in packages[name]) or "no other package"
        parts.append(f"\n## `{name}/`\n\n{sentence(folder / '__init__.py')}. ")
        parts.append(f"May import {allowed}.\n")
        files = (f for f in sorted(folder.rglob("*.py")) if f.stem != "__init__")
        rows = [(str(f.relative_to(folder)), sentence(f)) for f in files]
        parts.append(table(f"in `{name}/`", rows))
    scripts = sorted(f for f in (ROOT / "scripts").rglob("*.py"))
    rows = [(str(f.relative_to(ROOT / "scripts")), sentence(f)) for f in scripts]
    others = [("find_python.sh", "Finds the Python that make uses"),
              ("deploy/slurm.sh", "A run on a Slurm cluster"),
              ("deploy/jobset.yaml", "A run on Kubernetes"),
              ("deploy/jobset_elastic.yaml", "The same, while nodes come and go"),
              ("deploy/sky.yaml", "A run on several machines by SkyPilot"),
              ("docs/calibration.json", "The measured runs, with their command lines"),
              ("deploy/grafana_dashboard.json", "The dashboard, as Grafana imports it"),
              ("deploy/prometheus_rules.yml", "Alerts for Prometheus")]  # fmt: skip
    return "".join(parts) + BESIDE + table("in `scripts/`", rows + others)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), "utf-8")
    else:
        print(page(), end="")
