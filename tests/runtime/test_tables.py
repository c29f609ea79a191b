"""Tables of text and of consoles."""

import io

from rich.console import Console

from jaxpar.runtime import tables


def test_columns_are_aligned():
    rows = [("what", "ms", "note"), ("all", "1,234.5", "slow"), ("one of many", "2", "")]
    made = ["what              ms  note", "all          1,234.5  slow", "one of many        2"]
    assert tables.lines(rows, left=(0, 2)) == made
    assert tables.indented(rows, left=(0, 2)).splitlines() == [f"  {line}" for line in made]


def test_a_cell_wider_than_its_column_moves_the_others():
    assert tables.line(("12345", "x"), widths=(2, 3)) == "12345    x"


def test_long_cells_in_a_console_are_folded_where_asked():
    out = io.StringIO()
    rows = [("a", "word " * 12), ("b", "1")]
    made = tables.rich_table(["", "found"], rows, left=(0, 1), wrapped=(1,))
    Console(file=out, width=40).print(made)
    assert out.getvalue().count("word") == 12
    out = io.StringIO()
    Console(file=out, width=40).print(tables.titled("a title", ["", "found"], rows))
    assert out.getvalue().startswith("a title\n") and "…" in out.getvalue()
