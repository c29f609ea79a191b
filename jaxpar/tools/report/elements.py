"""Builds HTML and SVG as a tree, so that text from a run cannot become markup."""

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

type Child = ET.Element | str | None

#: Control characters, which are not allowed in HTML.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def e(tag: str, *children: Child, **attributes: object) -> ET.Element:
    """Return an element: `e("a", "text", class_="b", aria_label="c")`.

    Children and attributes that are None are skipped. Attribute names that Python reserves end in
    _, and other _ stand for -.
    """
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), clean(str(value)))
    for child in children:
        add(made, child)
    return made


def add(parent: ET.Element, child: Child) -> None:
    """Append an element or text."""
    if isinstance(child, ET.Element):
        parent.append(child)
    elif child is not None and len(parent):
        parent[-1].tail = (parent[-1].tail or "") + clean(child)
    elif child is not None:
        parent.text = (parent.text or "") + clean(child)


def clean(text: str) -> str:
    """Replace control characters."""
    return _CONTROL.sub("\ufffd", text)


def html(root: ET.Element) -> bytes:
    """Serialize the page. Text is escaped, except in script and style elements."""
    text = ET.tostring(root, encoding="unicode", method="html")
    return b"<!doctype html>\n" + text.encode("utf-8", "replace") + b"\n"


def table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], *, texts: int = 1, text_last: bool = False
) -> ET.Element:
    """Return a table that scrolls horizontally if it is too wide.

    Args:     texts: number of text columns, from the left; the others are numbers. text_last: the
              last column is text, too, and rows are not wrapped.
    """
    numbers = range(texts, len(names) - text_last)
    label = f"table: {', '.join(names)}"
    made = e("table", class_="unwrapped" if text_last else None)
    made.append(e("thead", e("tr", *(e("th", str(n), scope="col") for n in names))))
    body = e("tbody")
    for row in rows:
        cells = [e("th", _cell(row[0]), scope="row")]
        cells += [
            e("td", _cell(cell), class_="number" if at in numbers else None)
            for at, cell in enumerate(row[1:], 1)
        ]
        body.append(e("tr", *cells))
    made.append(body)
    return e("div", made, class_="scroll", tabindex=0, role="region", aria_label=label)


def _cell(value: Any) -> Any:
    return value if isinstance(value, ET.Element) else str(value)
