"""Files that only grow, in a store that cannot append: parts named by their ranges of bytes.

metrics.jsonl is the objects metrics.jsonl.parts/000000000000-000000004096 and so on. A reader joins
them. When there are MANY of them, a single object with all bytes replaces them: it is written
first, so that a reader always finds every byte at least once.
"""

import re
from pathlib import Path

from jaxpar.stores.objects import Altered, Missing, Objects

#: Files of a run that only grow.
GROWING = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "expert_loads.jsonl")

#: Number of parts that are joined in the store.
MANY = 100

_RANGE = re.compile("([0-9]{12})-([0-9]{12})")


def ranges(objects: Objects, name: str) -> list[tuple[int, int]]:
    """Return the ranges of a file's parts, by their first byte, the longest first."""
    below = f"{name}.parts/"
    found = (_RANGE.fullmatch(one.name.removeprefix(below)) for one in objects.names(below))
    there = [(int(one[1]), int(one[2])) for one in found if one]
    return sorted(there, key=lambda part: (part[0], -part[1]))


def length(parts: list[tuple[int, int]]) -> int:
    """Return the number of bytes that parts cover from the beginning, without a gap."""
    end = 0
    for first, last in parts:
        if first <= end:
            end = max(end, last)
    return end


def _object(name: str, first: int, last: int) -> str:
    return f"{name}.parts/{first:012}-{last:012}"


def joined(objects: Objects, name: str) -> tuple[bytes, str]:
    """Return the content of a file in a store up to the first damage, and what that is.

    Parts may disappear while this reads, when they are joined: then it starts again.

    Raises:   StoreError.
    """
    content = b""

    def join() -> str:
        nonlocal content
        content = b""
        for first, last in ranges(objects, name):
            if first > len(content):
                return f"{name} has no bytes {len(content):,} to {first:,}"
            if last <= len(content):
                continue
            try:
                part, _ = objects.read(_object(name, first, last))
            except Missing:
                raise Altered(f"{_object(name, first, last)} is missing") from None
            if len(part) != last - first:
                size = f"has {len(part):,} bytes, not {last - first:,}"
                return f"{_object(name, first, last)} {size}"
            content += part[len(content) - first :]
        return ""

    try:
        damage = objects.repeated(f"reading {name}", join)
    except Altered as error:
        damage = str(error)
    return content, damage


class Growing:
    """A growing file of a run's folder, and what of it is in the store."""

    def __init__(self, objects: Objects, folder: Path, name: str):
        self._objects, self._file, self.name = objects, folder / name, name
        self._known: list[tuple[int, int]] | None = None

    @property
    def _parts(self) -> list[tuple[int, int]]:
        if self._known is None:
            there = ranges(self._objects, self.name)
            if length(there) > self._size() or (there and length(there) < there[-1][1]):
                # The folder has what is intact of them (`fetching`): they are replaced by it.
                self._objects.delete([_object(self.name, *part) for part in there])
                there = []
            self._known = there
        return self._known

    def _size(self) -> int:
        return self._file.stat().st_size if self._file.is_file() else 0

    def waiting(self) -> int:
        """Return the number of bytes that are not in the store, as far as is known."""
        return max(self._size() - length(self._known or []), 0)

    def upload(self) -> int:
        """Upload what is new, as one part. Returns:  its bytes. Raises:   StoreError."""
        first = length(self._parts)
        if self._size() <= first:
            return 0
        with open(self._file, "rb") as opened:
            opened.seek(first)
            content = opened.read()
        # Whole lines: a reader in between finds no half of one.
        content = content[: content.rfind(b"\n") + 1]
        if not content:
            return 0
        self._objects.write(_object(self.name, first, first + len(content)), content)
        self._parts.append((first, first + len(content)))
        if len(self._parts) >= MANY:
            self._join()
        return len(content)

    def _join(self) -> None:
        """Replace all parts by one."""
        end = length(self._parts)
        with open(self._file, "rb") as opened:
            content = opened.read(end)
        if len(content) != end:
            return  # the file was deleted meanwhile
        self._objects.write(_object(self.name, 0, end), content)
        old = [part for part in self._parts if part != (0, end)]
        self._objects.delete([_object(self.name, *part) for part in old])
        self._known = [(0, end)]
