"""Writes Orbax's errors to a file of the run, rather than to the terminal.

When a save fails, each of Orbax's threads logs the same error with its own traceback: a thousand
lines for one full disk. The run itself warns in one line (`saving.py`).
"""

import errno
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import jax

from jaxpar.config.rules.paths import absolute

#: The logger of Orbax, and of other libraries.
_LOGGER = logging.getLogger("absl")

#: What Orbax says four times at each save, if each process saves to its own folder.
_OF_OWN_FOLDERS = "Global object size logging disabled"

#: Bytes of the file after which a new one is begun. One earlier file is kept.
MAX_BYTES = 8 << 20


def errors_file(run_dir: str | Path) -> Path:
    """Return the file of this process's errors: RUN/ranks/N.save_errors.txt."""
    return absolute(run_dir) / "ranks" / f"{jax.process_index()}.save_errors.txt"


@contextmanager
def errors_to_file(run_dir: str | Path) -> Iterator[None]:
    """Write errors that Orbax logs in this block to the run's file.

    The file appears with the first error. An error that cannot be written, as on a full disk, is
    dropped.
    """
    _say_once_that_loops_are_closed()
    handler = _File(errors_file(run_dir))

    def pass_on(record: logging.LogRecord) -> bool:
        if _OF_OWN_FOLDERS in str(record.msg):
            return False
        if record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts:
            return True
        handler.handle(record)
        return False

    _LOGGER.addFilter(pass_on)
    try:
        yield
    finally:
        _LOGGER.removeFilter(pass_on)
        handler.close()


#: The error of a callback of TensorStore, whose event loop Orbax has closed after a failed save.
_CLOSED = "Event loop is closed"


@functools.cache
def _say_once_that_loops_are_closed() -> None:
    """Print the first such error of this process whole, and no other: there is one for each write.

    The callbacks come from TensorStore's threads, some of them after the save has been reported.
    """
    hook, lock, said = sys.unraisablehook, threading.Lock(), []

    def report(about: Any) -> None:
        if isinstance(about.exc_value, RuntimeError) and str(about.exc_value) == _CLOSED:
            with lock:
                said.append(_CLOSED)
                if len(said) > 1:
                    return
        hook(about)

    sys.unraisablehook = report


class _File(RotatingFileHandler):
    """A file that is opened, in a folder that is made, with the first record."""

    def __init__(self, path: Path):
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless it says that the disk is full: the run's own records need it."""
        if os.strerror(errno.ENOSPC) in self.format(record):
            return
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record that cannot be written."""
