"""Two runs cannot write one run folder: whoever writes holds a lock on RUN/lock.

The lock is the kernel's (`flock`), so it ends with its holder, however that ends: SIGKILL leaves no
stale one behind. What is promised: two processes of one host always; two hosts where the file
system carries flock between them, as Linux's NFS does (4, and 3 with lockd) and Lustre with
`-o flock`. If an NFS client host dies, its server frees the lock when the lease ends, by default
after 90 s. A file system without locks is said so, and nothing guards the folder.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.lines import FULL

FILE = "lock"

#: What flock says where it is not offered.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def made_in(folder: Path) -> Iterator[None]:
    """Make a run folder, and then something in it.

    Raises:   ConfigError when one or the other cannot be; OSError when only room is missing, which
              the next start may find.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        rule, fix = f"cannot be written to: {error.strerror}", "use --run.dir for another"
        raise ConfigError("run.dir", str(folder), rule, fix) from error


class RunLock:
    """Holds a run folder for this process. Use as a context manager.

    Of the processes of one run, only process 0 takes it.
    """

    def __init__(self, folder: Path):
        """Take the lock, making the folder if need be.

        Raises:   ConfigError when another process holds it: host, pid, and since when; or when the
                  folder cannot be made, or written to.
        """
        self.warnings: list[str] = []
        with made_in(folder):
            self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(os.pread(self._file, 4096, 0))
            self.release()
            fix = "stop that run, or use a new --run.dir"
            raise ConfigError(
                "run.dir", str(folder), f"is being written by {holder}", fix
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.release()
                raise
            self.warnings = [f"no lock on {folder} ({error.strerror}): start no second run in it"]
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

    def release(self) -> None:
        """Let go. The file stays: to delete it would let two others lock two files."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(text: bytes) -> str:
    try:
        about = json.loads(text)
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not said which"
