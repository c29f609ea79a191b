"""The table of every config field: python scripts/docs/config_table.py [--write]

Read off the dataclasses of `jaxpar/config/schema.py` and `jaxpar/config/model_schema.py`: path,
type, default and the line under the field. Printed; with --write, put into
docs/configuration.md between its two markers.
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
    """A field's type in words: its choices, or the names of its types."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return " or ".join(type_text(option) for option in typing.get_args(hint))
    return "None" if hint is types.NoneType else hint.__name__


def default_text(path: str) -> str:
    """A field's default as the command line would set it."""
    default = fields.default_of(path)
    return f"`{default}`" if default != "" else "(empty)"


def section_table(name: str, cls: Any) -> list[str]:
    """Lines of one section's table; a section inside it follows as rows with longer paths."""
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
    """All sections as Markdown."""
    parts = []
    for name, cls in typing.get_type_hints(config.Config).items():
        head = ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines = [f"### {name}", "", inspect.getdoc(cls) or "", "", *head]
        parts.append("\n".join(lines + section_table(name, cls)) + "\n")
    return "\n".join(parts)


def main() -> None:
    """Print the table, or write it into the page."""
    if sys.argv[1:] != ["--write"]:
        print(table(), end="")
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
