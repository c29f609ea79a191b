"""Tables of text: lines with aligned columns, and rich's tables for consoles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def line(cells: Sequence[str], widths: Sequence[int], left: Sequence[int] = (0,)) -> str:
    """Return a row of a table whose widths are known: cells in `left` are left-aligned."""
    padded = (
        cell.ljust(width) if at in left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def lines(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), indent: str = "") -> list[str]:
    """Return rows as lines with aligned columns: those in `left` to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + line(row, widths, left) for row in rows]


def indented(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows as an indented block of text."""
    return "\n".join(lines(rows, left, "  "))


def rich_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    left: Sequence[int] = (0,),
    wrapped: Sequence[int] = (),
) -> Table:
    """Return a table for a console; long cells are cut, those of the columns `wrapped` folded."""
    from rich import box  # takes a while to import
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, name in enumerate(columns):
        made.add_column(
            name,
            justify="left" if at in left else "right",
            no_wrap=at not in wrapped,
            overflow="fold" if at in wrapped else "ellipsis",
        )
    for row in rows:
        made.add_row(*row)
    return made


def titled(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)
) -> Group:
    """Return a table for a console below its title, which may be wider than the table."""
    from rich.console import Group

    return Group(title, rich_table(columns, rows, left))
