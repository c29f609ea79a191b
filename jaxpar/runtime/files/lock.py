"""Locks between processes: the kernel's (`flock`), which end with their process.

The lock on RUN/lock prevents two runs from writing the same run folder. It always works for
processes of one host. For processes on different hosts it works if the file system supports flock
between hosts, as Linux's NFS does (4, and 3 with lockd), and Lustre with `-o flock`. If an NFS
client host dies, the server frees its lock when the lease expires, by default after 90 s, so a new
process waits for the lock. On a file system without locks, a warning is logged and the folder is
not protected.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files.append import FULL
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is missing.

    Args:     wait: until another process releases it.
    Raises:   BlockingIOError if another process holds it, without `wait`; other OSErrors.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(file)


FILE = "lock"

#: Seconds to wait for the lock: longer than NFS keeps the lock of a dead host.
WAIT_SECONDS = 120.0

#: Seconds between attempts to take the lock.
POLL_SECONDS = 0.25

#: Seconds between two looks at whether the lock's file is still there.
LOOK_SECONDS = 1.0

#: Transient errors, after which a retry may succeed.
PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)

#: Errors of flock on file systems without locks.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def create_in(folder: Path) -> Iterator[None]:
    """Make a run folder, for a block that creates something in it.

    Raises:   ConfigError if either fails permanently; OSError if the disk is full; RunError for
              other transient errors.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in PASSING:
            raise RunError(f"run.dir {folder} cannot be written: {error.strerror}") from error
        if error.errno in FULL:
            raise
        rule, fix = f"cannot be written: {error.strerror}", "use another --run.dir"
        raise ConfigError("run.dir", str(folder), rule, fix) from error


class RunLocked(RunError):
    """Another process is writing the run folder, and has not released it in time.

    Not a ConfigError: the same command may succeed later, so a launcher may retry it.
    """


class RunLock:
    """Lock on a run folder. Use as a context manager, in process 0 only."""

    def __init__(
        self,
        folder: Path,
        seconds: float = WAIT_SECONDS,
        report: Callable[[str], None] = peers.log,
    ):
        """Take the lock, and create the folder if needed.

        Args:     seconds: to wait while another process holds the lock. report: called once with a
                  message that names the other process, its host and its start time.
        Raises:   RunLocked if the other process still holds the lock; ConfigError if the folder
                  cannot be created or written.
        """
        self.warnings: list[str] = []
        self._folder, self._locks, self._looked = folder, True, time.monotonic()
        with create_in(folder):
            self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(folder, seconds, report)
            self.check(at_once=True)  # while this one waited, the file may have been deleted
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.release()
                raise
            self._locks = False
            self.warnings = [f"cannot lock {folder} ({error.strerror}): do not start another run"]
        except BaseException:  # including Ctrl-C
            self.release()
            raise
        self._sign()

    def _sign(self) -> None:
        """Write who holds the lock. Releases it on an error."""
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(about).encode() + b"\n", 0)
        except OSError as error:
            self.release()
            raise OSError(error.errno, error.strerror, str(self._folder / FILE)) from error

    def check(self, at_once: bool = False) -> None:
        """Check that RUN/lock is still the locked file; if it was deleted, lock it again.

        A file that was deleted does not stop another run from locking a new one.

        Args:     at_once: also within LOOK_SECONDS of the previous look.
        Raises:   RunLocked when another process has locked the new file. It may be writing the
                  folder, so this one must not.
        """
        if not at_once and time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        path = self._folder / FILE
        if not self._locks or self._file < 0 or _is_at(self._file, path):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:  # look again later
            return warn(f"{path} was deleted, and cannot be created: {error.strerror}")
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(new)
            os.close(new)
            why = f"{path} was deleted during the run, and {holder} has locked a new one"
            raise RunLocked(
                f"{why}. This run stops without saving, so that only one writes"
            ) from None
        os.close(self._file)
        self._file = new
        self._sign()
        warn(f"{path} was deleted during the run; it was created and locked again")

    def _take(self, folder: Path, seconds: float, report: Callable[[str], None]) -> None:
        """Lock the open file. Args as `__init__`. Raises:   RunLocked, or OSError."""
        until, told = time.monotonic() + seconds, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            taken = f"run.dir {folder} is being written by {_holder(self._file)}"
            if time.monotonic() >= until:
                after = f", still after {seconds:.0f} s" if told else ""
                raise RunLocked(f"{taken}{after}. Fix: stop that run, or use a new --run.dir")
            if not told:
                report(f"waiting    {taken}; for at most {seconds:.0f} s, or until Ctrl-C")
                told = True
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Release the lock. The file stays: a process could lock it after its deletion."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_at(file: int, path: Path) -> bool:
    """Whether a path leads to an open file. Also when it cannot be looked at for the moment."""
    try:
        here, there = os.fstat(file), os.stat(path)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _holder(file: int) -> str:
    try:
        about = read_json(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not recorded its id"
