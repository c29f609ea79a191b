"""Notebooks as pages of the site: their text, code, and committed outputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page_of(notebook: Path) -> str:
    """Return a notebook as Markdown."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield a cell's text, or its code and outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield _block(source, "python")
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            yield f"![What the code above draws](data:image/png;base64,{image})"
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield _block(text, "text")


def _block(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"
