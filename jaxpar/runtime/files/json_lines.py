"""JSON Lines files that a run appends to: metrics, events, steps and samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.runtime.terminal import warn

#: Limit on the bytes of a line.
MAX_LINE_BYTES = 8 << 20

#: Files of which this process has said that lines were skipped.
_reported: set[Path] = set()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order; none if there is no file.

    Lines that cannot be read, for example those that a crash has truncated, are skipped. The first
    of a file is reported on standard error, once per process, unless it may be a write in progress.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(_lines(file), 1):
            try:
                record = read_json_object(line, what="it", max_bytes=MAX_LINE_BYTES)
            except UnreadableJson as error:
                if line.endswith(b"\n") and line.strip():
                    _report(path, number, error)
                continue
            yield record


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, or None if the line is not a complete object."""
    try:
        return read_json_object(line, max_bytes=MAX_LINE_BYTES)
    except UnreadableJson:
        return None


def _lines(file: Any) -> Iterator[bytes]:
    """Yield the lines of a file. Of a longer line, a part above the limit stands for the line."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line if rest is line else line + b"\n"


def _report(path: Path, number: int, error: UnreadableJson) -> None:
    if path not in _reported:
        _reported.add(path)
        warn(f"line {number} of {path} is skipped, as are others like it: {error}")
