"""Prints a generated table, or writes it between the markers of its page: for the scripts here."""

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def between(mark: str, table: str) -> str:
    """Return a table between its markers."""
    return f"<!-- {mark} -->\n{table}<!-- /{mark} -->"


def run(about: str, page: str, mark: str, table: Callable[[], str]) -> None:
    """Print a table, or with --write replace what is between its markers.

    Args:
        about:  the docstring of the script, for other options.
        page:   below docs/.
        mark:   the text of the markers.
    """
    if sys.argv[1:] == ["--write"]:
        file = DOCS / page
        before, _, rest = file.read_text("utf-8").partition(f"<!-- {mark} -->\n")
        file.write_text(before + between(mark, table()) + rest.partition(f"<!-- /{mark} -->")[2])
    elif sys.argv[1:]:
        sys.exit(about)
    else:
        print(table(), end="")
