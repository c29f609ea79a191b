"""A text file that lines are appended to, by a program that a full disk must not end."""

import errno
import os
import sys
from io import RawIOBase
from pathlib import Path

#: What a disk that is full, over quota or failing says; any other error is raised.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Bytes that wait in memory for room; beyond them the oldest lines are lost.
MAX_WAITING_BYTES = 8 << 20


class Lines:
    """Appends lines at once. Those for which there is no room wait, and are written with the next.

    One warning says so when it begins, and another when lines are lost. A line that was cut off, by
    a crash or for want of room, is ended first: the next one, glued to it, would be lost as well.
    """

    def __init__(self, path: Path | str):
        """Raises:   OSError when the file cannot be opened."""
        self._path, self._failing = path, False
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        #: Whether the file ends within a line.
        self._cut = _ends_within_a_line(self._file)
        self._waiting = b"\n" if self._cut else b""

    def write(self, text: str) -> None:
        """Append text that ends a line.

        Raises:   OSError, but for those of FULL.
        """
        self._waiting += text.encode()
        if len(self._waiting) > MAX_WAITING_BYTES:
            latest = self._waiting[-MAX_WAITING_BYTES:].partition(b"\n")[2]
            self._waiting = b"\n" + latest if self._cut else latest
            self._warn("has no room, and its oldest lines are lost")
        try:
            while self._waiting:
                written = self._file.write(self._waiting)
                self._cut = self._waiting[written - 1 : written] != b"\n"
                self._waiting = self._waiting[written:]
            self._failing = False
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._failing:
                self._warn(f"cannot be written to ({error.strerror}); its lines wait")
            self._failing = True

    def close(self) -> None:
        """Write what waits, if there is room by now, and close the file."""
        self.write("")
        if lost := self._waiting.lstrip(b"\n").count(b"\n"):
            self._warn(f"lacks its last {lost} lines")
        self._file.close()

    def _warn(self, what: str) -> None:
        print(f"WARNING    {self._path} {what}", file=sys.stderr, flush=True)


def _ends_within_a_line(file: RawIOBase) -> bool:
    """Whether the last byte of a file that can be read ends no line."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
