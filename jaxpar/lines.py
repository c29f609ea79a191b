"""A text file that lines are appended to, by a program that a full disk must not end."""

import errno
import sys
from pathlib import Path

#: What a disk that is full, over quota or failing says; any other error is raised.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Bytes that wait in memory for room; beyond them the oldest lines are lost.
MOST_WAITING = 8 << 20


class Lines:
    """Appends lines at once. Those for which there is no room wait, and are written with the next.

    One warning says so when it begins, and another when lines are lost.
    """

    def __init__(self, path: Path | str):
        """Raises:   OSError when the file cannot be opened."""
        self._path, self._waiting, self._failing = path, b"", False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, text: str) -> None:
        """Append text that ends a line.

        Raises:   OSError, but for those of FULL.
        """
        self._waiting += text.encode()
        if len(self._waiting) > MOST_WAITING:
            self._waiting = self._waiting[-MOST_WAITING:].partition(b"\n")[2]
            self._warn("has no room, and its oldest lines are lost")
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
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
        if self._waiting:
            self._warn(f"lacks its last {self._waiting.count(b'\n')} lines")
        self._file.close()

    def _warn(self, what: str) -> None:
        print(f"WARNING    {self._path} {what}", file=sys.stderr, flush=True)
