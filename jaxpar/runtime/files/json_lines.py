"""JSON Lines files that a run appends to: metrics, events, steps and samples."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order; none if there is no file.

    Incomplete lines, from a crash or a write in progress, are skipped.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            record = parse(line)
            if record is not None:
                yield record


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, or None if the line is not a complete object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
