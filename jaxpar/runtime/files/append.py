"""Append-only text files that survive a full disk."""

import errno
import os
import shutil
import time
import weakref
from io import RawIOBase
from pathlib import Path

from jaxpar.config.rules.paths import absolute
from jaxpar.runtime.terminal import warn

#: Errors of a disk that is full, over quota or failing. Other errors are raised.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Seconds between two looks at whether the file is still there.
LOOK_SECONDS = 1.0

#: Maximum bytes that wait in memory for disk space. Beyond it, the oldest lines are lost.
MAX_WAITING_BYTES = 8 << 20


class Lines:
    """Appends lines without buffering. Lines wait in memory while there is no disk space.

    A warning is printed when lines start to wait, and when lines are lost. If the file ends with a
    truncated line, from a crash or a full disk, that line is ended first, so that the next one is
    not appended to it. If the file, or its folder, is deleted, it is written again with all its
    lines, and a warning.
    """

    def __init__(self, path: Path | str):
        """Open the file, creating its folder. Raises:   OSError if it cannot be opened."""
        self._path, self._failing, self._abandoned = Path(path), False, False
        self._waiting = b""
        self._open()
        _open_files.add(self)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        opened = os.fstat(self._file.fileno())
        self._identity, self._looked = (opened.st_dev, opened.st_ino), time.monotonic()
        self._end_a_truncated_line()

    def _end_a_truncated_line(self) -> None:
        #: Whether the file ends with a truncated line.
        self._cut = _ends_within_a_line(self._file)
        if self._cut:
            self._waiting = b"\n" + self._waiting

    def write(self, text: str) -> None:
        """Append text that ends with a newline.

        Raises:   OSError, except those in FULL.
        """
        if self._abandoned:
            return
        self._waiting += text.encode()
        self._open_again_if_deleted()
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

    def _open_again_if_deleted(self) -> None:
        """Follow the path if it no longer leads to the open file. Looks once in LOOK_SECONDS."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked, deleted = time.monotonic(), False
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            deleted = True
        except OSError:
            return  # of the machine, for the moment
        if not deleted and (there.st_dev, there.st_ino) == self._identity:
            return
        before = self._file
        try:
            self._open()
            if deleted:  # the open file still has its content
                before.seek(0)
                shutil.copyfileobj(before, self._file)
                self._end_a_truncated_line()
        except OSError as error:
            why = f"not all can be written again: {error}"
            warn(f"{self._path} was deleted during the run, and {why}")
        else:
            how = "deleted during the run; its lines were written again"
            warn(f"{self._path} was {how if deleted else 'replaced during the run'}")
        if self._file is not before:
            before.close()

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
