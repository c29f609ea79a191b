"""Append-only text files that survive a full disk."""

import errno
import os
import weakref
from io import RawIOBase
from pathlib import Path

from jaxpar.config.rules.paths import absolute
from jaxpar.runtime.messages import warn

#: Errors of a disk that is full, over quota or failing. Other errors are raised.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Maximum bytes that wait in memory for disk space. Beyond it, the oldest lines are lost.
MAX_WAITING_BYTES = 8 << 20


class Lines:
    """Appends lines without buffering. Lines wait in memory while there is no disk space.

    A warning is printed when lines start to wait, and when lines are lost. If the file ends with a
    truncated line, from a crash or a full disk, that line is ended first, so that the next one is
    not appended to it.
    """

    def __init__(self, path: Path | str):
        """Open the file, creating its folder. Raises:   OSError if it cannot be opened."""
        self._path, self._failing, self._abandoned = Path(path), False, False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        #: Whether the file ends with a truncated line.
        self._cut = _ends_within_a_line(self._file)
        self._waiting = b"\n" if self._cut else b""
        _open_files.add(self)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def write(self, text: str) -> None:
        """Append text that ends with a newline.

        Raises:   OSError, except those in FULL.
        """
        if self._abandoned:
            return
        self._waiting += text.encode()
        if len(self._waiting) > MAX_WAITING_BYTES:
            latest = self._waiting[-MAX_WAITING_BYTES:].partition(b"\n")[2]
            self._waiting = b"\n" + latest if self._cut else latest
            warn(f"{self._path} has no disk space; its oldest waiting lines are lost")
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
                why = f"cannot be written ({error.strerror})"
                warn(f"{self._path} {why}; its lines wait in memory")
            self._failing = True

    def abandon(self) -> None:
        """Write nothing more."""
        self._abandoned, self._waiting = True, b""

    def close(self) -> None:
        """Write the waiting lines if possible, and close the file."""
        self.write("")
        if lost := self._waiting.lstrip(b"\n").count(b"\n"):
            warn(f"{self._path} is missing its last {lost} lines")
        self._file.close()


#: All open files of this process.
_open_files: weakref.WeakSet[Lines] = weakref.WeakSet()


def abandon(folder: Path) -> None:
    """Write nothing more to the open files in a folder, because another process writes it now."""
    for file in list(_open_files):
        if absolute(folder) in absolute(file.path).parents:
            file.abandon()


def _ends_within_a_line(file: RawIOBase) -> bool:
    """Return whether the last byte of a file is not a newline."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
