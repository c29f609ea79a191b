"""Makes the table of config fields: python scripts/docs/config_table.py [--write]

Path, type, default and description are from the dataclasses of `jaxpar/config/schema/`, a
section each. Without options, prints the table. --write writes it between the markers of
docs/configuration.md.
"""

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

from jaxpar import config
from jaxpar.config import fields

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- config table -->\n", "<!-- /config table -->"


def type_text(hint: Any) -> str:
    """Describe a field's type: its choices, or the names of its types."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return " or ".join(type_text(option) for option in typing.get_args(hint))
    return "None" if hint is types.NoneType else hint.__name__


def default_text(path: str) -> str:
    """Return a field's default as written on the command line."""
    default = fields.default_of(path)
    return f"`{default}`" if default != "" else "(empty)"


def section_table(name: str, cls: Any) -> list[str]:
    """Return the lines of a section's table; nested sections follow with longer paths."""
    cell = lambda text: text.replace("|", r"\|")  # noqa: E731
    lines = []
    for field, hint in typing.get_type_hints(cls).items():
        path, inner = f"{name}.{field}", fields.section_of(hint)
        default = "`None`" if inner else default_text(path)
        row = (f"`{path}`", type_text(hint), default, fields.meanings(cls)[field])
        lines.append("| " + " | ".join(map(cell, row)) + " |")
        if inner is not None:
            lines += section_table(path, inner)
    return lines


def table() -> str:
    """Return the tables of all sections as Markdown."""
    parts = []
    for name, cls in typing.get_type_hints(config.Config).items():
        head = ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines = [f"### {name}", "", inspect.getdoc(cls) or "", "", *head]
        parts.append("\n".join(lines + section_table(name, cls)) + "\n")
    return "\n".join(parts)


def main() -> None:
    """Print the table or write it to the page."""
    if sys.argv[1:] != ["--write"]:
        print(table(), end="")
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
