"""Files of one JSON object a line, to which a run appends: metrics, events, steps, samples."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order, one in memory at a time; none where there is no file.

    Passed over is a line that a crash has cut off, or that is being written.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            record = parse(line)
            if record is not None:
                yield record


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it holds none that is whole."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
