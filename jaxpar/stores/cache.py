"""A bounded cache of parts of objects in a folder of this host, which its processes share.

Each part is a file with its digest, named when it is complete. A part is fetched by one process at
a time. When the cache is nearly full, the parts that have not been read for longest are deleted.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.runtime.files import atomic
from jaxpar.runtime.messages import warn

#: Errors of a folder that this user may not write to.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

#: Bytes of a digest, which ends the file of a part.
DIGEST_BYTES = 16

#: Seconds between two records of a part's use.
USE_SECONDS = 60.0

#: Shares of the limit: at the first, parts are deleted until the second is left; each process looks
#: when it has added the third.
FULL, AFTER, LOOK = 0.875, 0.75, 1 / 64

#: Parts are fetched one at a time by each of these locks.
LOCKS = 1024

#: Seconds after which an unfinished file is that of a dead process.
ABANDONED_SECONDS = 3600.0


def digest_of(content: bytes) -> bytes:
    """Return the digest of a part."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class PartCache:
    """A cache of parts below a folder. May be used from any thread and process."""

    def __init__(self, folder: Path, limit: int):
        """
        Args:     folder: made if it is missing. If this user may not write to it, what it has is
                  read, and nothing is kept, with a warning. limit: bytes.
        Raises:   OSError if it cannot be made, or read.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit = folder, limit
        #: Bytes of the objects that are read through it by this process.
        self.claimed = 0
        self._mutexes = [threading.Lock() for _ in range(LOCKS + 1)]
        self._checked: dict[Path, tuple[int, int]] = {}
        self._added, self._warned, self._adding = 0.0, False, threading.Lock()
        #: None for a folder that this user may only read.
        self._locks: int | None = None
        try:
            self._locks = os.open(folder / "locks", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            os.scandir(folder).close()
            self._warn_once(error)
        self.remove_oldest()

    def place(self, key: str, number: int) -> Path:
        """Return the file of a part."""
        return self.folder / key / f"{number:08}"

    def has(self, key: str, number: int) -> bool:
        """Whether a part is here. It may be damaged, or deleted at any time."""
        return self.place(key, number).exists()

    def read(
        self, key: str, number: int, size: int, span: slice, fetch: Callable[[], bytes]
    ) -> bytes:
        """Return a span of a part, which is fetched if it is not here, or is damaged.

        Args:     size: bytes of the part. fetch: returns them.
        Raises:   as `fetch`.
        """
        place = self.place(key, number)
        if (found := self._found(place, size, span)) is not None:
            return found
        number = int.from_bytes(digest_of(str(place).encode())[:4]) % LOCKS
        with self._alone(number):
            if (found := self._found(place, size, span)) is not None:  # of another process
                return found
            content = fetch()
            kept = self._keep(place, content)
        if kept:
            self._look_sometimes(len(content))
        return content[span]

    def _found(self, place: Path, size: int, span: slice) -> bytes | None:
        """Return a span of a part that is here and intact."""
        try:
            with open(place, "rb", buffering=0) as file:
                about = os.fstat(file.fileno())
                mark = about.st_ino, about.st_mtime_ns
                if self._checked.get(place) != mark:
                    content = file.read()
                    stored, digest = content[:size], content[size:]
                    if len(stored) != size or digest != digest_of(stored):
                        warn(f"{place} is damaged, and is fetched again")
                        place.unlink(missing_ok=True)
                        return None
                    self._checked[place] = mark
                    found = stored[span]
                else:
                    first, last, _ = span.indices(size)
                    found = os.pread(file.fileno(), last - first, first)
                    if len(found) != last - first:
                        self._checked.pop(place, None)  # as may another thread
                        return self._found(place, size, span)
                if time.time() - about.st_atime > USE_SECONDS:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno(), ns=(time.time_ns(), about.st_mtime_ns))
                return found
        except FileNotFoundError:
            self._checked.pop(place, None)
            return None
        except OSError as error:  # of the disk: the part is read from the store
            warn(f"{place} cannot be read: {error.strerror}")
            return None

    @contextlib.contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """Hold a lock against other threads and processes."""
        with self._mutexes[number]:  # locks of a file are those of a process
            if self._locks is None:
                yield
                return
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, number)
            try:
                yield
            finally:
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)

    def _keep(self, place: Path, content: bytes) -> bool:
        """Write a part. Returns:  False, with a warning, if it cannot be written."""
        if self._locks is None:
            return False
        try:
            place.parent.mkdir(exist_ok=True)
            with atomic.new_file(place, durable=False) as temporary:
                temporary.write_bytes(content + digest_of(content))
        except OSError as error:
            self._warn_once(error)
            return False
        return True

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warn(f"{self.folder} cannot be written ({error.strerror}): parts are not kept")

    def _look_sometimes(self, added: int) -> None:
        with self._adding:
            self._added += added + DIGEST_BYTES
            look = self._added >= self.limit * LOOK
            self._added = 0.0 if look else self._added
        if look:
            self.remove_oldest()

    def remove_oldest(self) -> None:
        """Delete the parts that have not been read for longest, if the cache is nearly full."""
        if self._locks is None:
            return
        with self._alone(LOCKS):
            found = sorted(_files(self.folder))
            total = sum(size for _, size, _ in found)
            if total <= self.limit * FULL:
                return
            for _, size, path in found:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
                if total <= self.limit * AFTER:
                    break


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield the time of the last use, the size and the path of each part.

    Files that a killed process has left unfinished are deleted.
    """
    for key in sorted(os.scandir(folder), key=lambda entry: entry.path):
        if not key.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):
            for entry in sorted(os.scandir(key.path), key=lambda entry: entry.path):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    about = entry.stat()
                    if not entry.name.endswith(".tmp"):
                        yield about.st_atime, about.st_size, entry.path
                    elif time.time() - about.st_mtime > ABANDONED_SECONDS:
                        os.unlink(entry.path)
