"""HTML and SVG as a tree, so that nothing that a run holds can become markup."""

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

type Child = ET.Element | str | None

#: Characters that may not be in a page.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def e(tag: str, *children: Child, **attributes: object) -> ET.Element:
    """An element: `e("a", "text", class_="b", aria_label="c")`. None is left out everywhere.

    Names of attributes end in _ where Python reserves them, and have _ for -.
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
    """The text with a sign for each character that a page may not hold."""
    return _CONTROL.sub("\ufffd", text)


def html(root: ET.Element) -> bytes:
    """The page. Text is escaped; that of script and style elements stands as it is."""
    text = ET.tostring(root, encoding="unicode", method="html")
    return b"<!doctype html>\n" + text.encode("utf-8", "replace") + b"\n"


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], *, texts: int = 1) -> ET.Element:
    """A table that scrolls by itself where it is too wide.

    Args:     texts: columns, from the left, that are text; the others are numbers.
    """
    label = f"table: {', '.join(names)}"
    made = e("table")
    made.append(e("thead", e("tr", *(e("th", str(n), scope="col") for n in names))))
    body = e("tbody")
    for row in rows:
        cells = [e("th", _cell(row[0]), scope="row")]
        cells += [
            e("td", _cell(cell), class_="number" if at >= texts else None)
            for at, cell in enumerate(row[1:], 1)
        ]
        body.append(e("tr", *cells))
    made.append(body)
    return e("div", made, class_="scroll", tabindex=0, role="region", aria_label=label)


def _cell(value: Any) -> Any:
    return value if isinstance(value, ET.Element) else str(value)
