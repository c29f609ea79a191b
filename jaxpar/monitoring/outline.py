"""Finds the valid records of metrics.jsonl: those of steps that no later attempt repeated."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.runtime.files import json_lines

# A step is an int32: a number with more digits is damaged.
_STEP = re.compile(rb'\{"step": ?(\d{1,10})[,}]')
_RESUMED = re.compile(rb'\{"resumed_after_step": ?(\d{1,10})[,}]')

#: Names in the records of evaluations, which follow the record of the same step.
_EVALUATED = (b'"held_out_loss"', b'"test_loss"')

MAX_STEPS = 2**31 - 1


@dataclass
class Outline:
    """The result of a first pass over a file: where attempts start, to skip repeated steps."""

    path: Path
    end: int = 0
    """Bytes of complete lines when the pass began: a run may be appending more."""
    count: int = 0
    """Number of step records."""
    last_step: int = 0
    starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """For each attempt, the byte at which it starts and the step that precedes it."""

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the valid records in order, with one in memory at a time."""
        if not self.path.is_file():
            return
        limits = self._limits()
        with open(self.path, "rb") as file:
            place, attempt = 0, 0
            for line in _pieces(file):
                while attempt + 1 < len(self.starts) and place >= self.starts[attempt + 1][0]:
                    attempt += 1
                place += len(line)
                if place > self.end:
                    return
                record = json_lines.parse(line)
                if record is None or not isinstance(step := record.get("step", 0), int):
                    continue  # truncated or damaged
                if 0 <= step <= min(limits[attempt], MAX_STEPS):
                    yield record

    def _limits(self) -> list[float]:
        """Return the last valid step of each attempt: no later attempt repeated it."""
        limits = [float("inf")]
        for _, step in reversed(self.starts[1:]):
            limits.append(min(limits[-1], step))
        return limits[::-1]


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one beyond the limit, which is damaged, in pieces."""
    return iter(lambda: file.readline(json_lines.MAX_LINE_BYTES), b"")


def outline(path: Path) -> Outline:
    """Scan a metrics.jsonl without parsing its numbers."""
    found = Outline(path)
    if not path.is_file():
        return found
    before, size = 0, path.stat().st_size
    with open(path, "rb") as file:
        for line in _pieces(file):
            whole = line.endswith(b"\n") or len(line) == json_lines.MAX_LINE_BYTES
            if found.end + len(line) > size or not whole:
                break
            place, found.end = found.end, found.end + len(line)
            if resumed := _RESUMED.search(line):  # also after a truncated line
                found.starts.append((place, before := int(resumed[1])))
            elif not any(map(line.__contains__, _EVALUATED)) and (step := _STEP.match(line)):
                number = int(step[1])
                if number <= before:  # a start from scratch writes no record of it
                    found.starts.append((place, number - 1))
                before, found.count = number, found.count + 1
                found.last_step = max(found.last_step, number)
    return found
