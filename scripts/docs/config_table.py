"""Makes the table of config fields: python scripts/docs/config_table.py [--write]

Path, default, type and description are from the dataclasses of `jaxpar/config/schema/`, a section
each. Without options, prints the table. --write writes it between the markers of
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


def values_text(path: str, hint: Any) -> str:
    """Describe a field's default, as on the command line, and what else it may be.

    The type of a number, a boolean or a text is that of the default.
    """
    default = fields.default_of(path)
    others = [text for text in _others(hint) if text not in ("None", default)]
    return ", ".join([f"`{default}`" if default != "" else "(empty)", *others])


def _others(hint: Any) -> list[str]:
    """Return the choices of a field, or the types of one that may be None."""
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [option for option in typing.get_args(hint) if option is not types.NoneType]
        return [text for part in parts for text in _others(part) or [part.__name__]]
    return []


def section_table(name: str, cls: Any) -> list[str]:
    """Return the lines of a section's table; nested sections follow with longer paths."""
    cell = lambda text: text.replace("|", r"\|")  # noqa: E731
    lines = []
    for field, hint in typing.get_type_hints(cls).items():
        path, inner = f"{name}.{field}", fields.section_of(hint)
        values = "`None`, a section" if inner else values_text(path, hint)
        row = (f"`{path}`", values, fields.meanings(cls)[field])
        lines.append("|" + "|".join(map(cell, row)) + "|")
        if inner is not None:
            lines += section_table(path, inner)
    return lines


def table() -> str:
    """Return the tables of all sections as Markdown."""
    parts = []
    for name, cls in typing.get_type_hints(config.Config).items():
        head = ["|field|default, others|meaning|", "|---|---|---|"]
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
