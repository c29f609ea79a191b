"""Two runs cannot write one run folder: whoever writes holds a lock on RUN/lock.

The lock is the kernel's (`flock`), so it ends with its holder, however that ends: SIGKILL leaves no
stale one behind. What is promised: two processes of one host always; two hosts where the file
system carries flock between them, as Linux's NFS does (4, and 3 with lockd) and Lustre with
`-o flock`. If an NFS client host dies, its server frees the lock when the lease ends, by default
after 90 s: so a lock that is held is waited for. A file system without locks is said so, and
nothing guards the folder.
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
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files.append import FULL
from jaxpar.runtime.processes import peers

FILE = "lock"

#: How long another's lock is waited for: longer than NFS keeps that of a host that has died.
WAIT_SECONDS = 120.0

#: How often it is tried meanwhile.
POLL_SECONDS = 0.25

#: What the system says when the same may succeed a moment later.
PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)

#: What flock says where it is not offered.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def create_in(folder: Path) -> Iterator[None]:
    """Make a run folder, and then something in it.

    Raises:   ConfigError when one or the other cannot be; OSError when only room is missing, which
              the next start may find; RunError for what else may pass.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in PASSING:
            raise RunError(f"run.dir {folder} cannot be written to: {error.strerror}") from error
        if error.errno in FULL:
            raise
        rule, fix = f"cannot be written to: {error.strerror}", "use --run.dir for another"
        raise ConfigError("run.dir", str(folder), rule, fix) from error


class RunLocked(RunError):
    """Another process writes the run folder, and has not let go of it in time.

    No ConfigError: the same command may succeed a moment later, so that a launcher may try again.
    """


class RunLock:
    """Holds a run folder for this process. Use as a context manager.

    Of the processes of one run, only process 0 takes it.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float = WAIT_SECONDS,
        report: Callable[[str], None] = peers.log,
    ):
        """Take the lock, making the folder if need be.

        Args:     seconds: to wait while another process holds it. report: called once, with the
                  host, the process id and since when.
        Raises:   RunLocked when it still does; ConfigError when the folder cannot be made or
                  written to.
        """
        self.warnings: list[str] = []
        with create_in(folder):
            self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(folder, seconds, report)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.release()
                raise
            self.warnings = [f"no lock on {folder} ({error.strerror}): start no second run in it"]
        except BaseException:  # Ctrl-C among them
            self.release()
            raise
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
            raise OSError(error.errno, error.strerror, str(folder / FILE)) from error

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
                report(f"waiting    {taken}; for {seconds:.0f} s at most, or until Ctrl-C")
                told = True
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Let go. The file stays: to delete it would let two others lock two files."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(file: int) -> str:
    try:
        about = json.loads(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not said which"
