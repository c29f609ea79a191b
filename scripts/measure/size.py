"""Measures the size of the project: python scripts/measure/size.py [--beside FOLDER] [--tests]

Prints one row a figure: code, modules that a run of the quickstart imports, pages and words of the
docs (recipes and docs/extend by themselves), commands, bytes of the published cards. --beside adds
a column for another checkout, such as `git worktree add ../before a18dd203`. --tests also runs the
default tests, alone on this machine, and measures their time.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="root of another checkout, measured first")
    parser.add_argument("--tests", action="store_true", help="also run and time the tests")
    options = parser.parse_args()
    roots = [*([options.beside.resolve()] if options.beside else []), ROOT]
    columns = [measured(root, options.tests) for root in roots]
    for name in columns[-1]:
        print(f"{name:<44}" + "".join(f"{column.get(name, '-'):>12}" for column in columns))


def measured(root: Path, tests: bool) -> dict[str, str]:
    """Return {figure: value} of a checkout."""
    code = [path.read_text("utf-8") for path in (root / "jaxpar").rglob("*.py")]
    of_tests = [path.read_text("utf-8") for path in (root / "tests").rglob("*.py")]
    pages = pages_of(root)
    cards = [
        *(root / "docs/benchmarks").glob("*.json"),
        *(root / "docs/experiments").glob("*.json"),
    ]
    figures = {
        "files of the package": len(code),
        "lines of the package": sum(text.count("\n") for text in code),
        "statements of the package": sum(map(statements, code)),
        "lines of the tests": sum(text.count("\n") for text in of_tests),
        "lines of scripts/": lines_of(root / "scripts"),
        "modules that train quickstart imports": imported(root),
        "commands": commands(root),
        **{f"pages of {part}": len(counts) for part, counts in pages.items()},
        **{f"words of {part}": sum(counts) for part, counts in pages.items()},
        "bytes of cards": sum(card.stat().st_size for card in cards),
    }
    if tests:
        figures["seconds of the tests"] = seconds_of_tests(root)
    return {name: f"{value:,}" for name, value in figures.items()}


def pages_of(root: Path) -> dict[str, list[int]]:
    """Return {part of the docs: words of each of its pages}."""
    found: dict[str, list[int]] = {
        "docs": [],
        "docs/recipes": [],
        "docs/extend": [],
        "the root": [],
    }
    for page in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        folder = page.parent.relative_to(root).as_posix()
        part = "the root" if folder == "." else folder if folder in found else "docs"
        found[part].append(len(page.read_text("utf-8").split()))
    return found


def statements(text: str) -> int:
    """Count the statements of a file, docstrings included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def lines_of(folder: Path) -> int:
    """Count the lines of a folder's Python files."""
    return sum(path.read_text("utf-8").count("\n") for path in folder.rglob("*.py"))


def imported(root: Path) -> int:
    """Train the quickstart for one step, and count the package's modules that Python imports."""
    with tempfile.TemporaryDirectory() as folder:
        prepare = ["-m", "jaxpar.data", "prepare", "--input", "stdlib", "--tokenizer", "bytes"]
        python(root, [*prepare, "--output", f"{folder}/text"])
        train = ["-v", "-m", "jaxpar.train", "quickstart", "--run.cpu-devices", "1"]
        options = ["--train.num-steps", "1", "--data.path", f"{folder}/text"]
        said = python(root, [*train, *options, "--run.dir", f"{folder}/run"])
    return len(set(re.findall(r"^import '(jaxpar[.\w]*)' #", said, re.MULTILINE)))


def commands(root: Path) -> int:
    """Count the commands of the package."""
    count = "from jaxpar.commands import COMMANDS; print(len(COMMANDS))"
    return int(python(root, ["-c", count]).split()[-1])


def python(root: Path, arguments: list[str]) -> str:
    """Run Python on a checkout. Returns what it prints. Raises RuntimeError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def seconds_of_tests(root: Path) -> int:
    """Run the default tests with a process for each core. Returns their seconds."""
    began = time.monotonic()
    several = ["-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder"]
    python(root, ["-m", "pytest", "-q", *several])
    return round(time.monotonic() - began)


if __name__ == "__main__":
    main()
