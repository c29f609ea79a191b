"""Objects that are read by parts through a bounded cache in a folder of this host, or by ranges.

The processes of a host share the cache. Each part is a file with its digest, named when it is
complete. A part is fetched by one process at a time. When the cache is nearly full, the parts that
have not been read for longest are deleted.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.terminal import warn
from jaxpar.stores.objects import Altered, Conflict, Missing, Objects, Stamp

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
        #: Bytes of the objects whose parts this process keeps in it.
        self.claimed = 0
        #: Of threads that read objects.
        self.pool = ThreadPoolExecutor(FETCHED_AT_ONCE, thread_name_prefix="parts")
        self._tasks, self._fillers = deque[Callable[[], None]](), 0
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

    def fill(self, task: Callable[[], None]) -> None:
        """Call a task in the background, on one of REST_AT_ONCE threads, which delay no exit."""
        with self._adding:
            self._tasks.append(task)
            if self._fillers == REST_AT_ONCE:
                return
            self._fillers += 1
        threading.Thread(target=self._fill, name="rest", daemon=True).start()

    def _fill(self) -> None:
        while True:
            with self._adding:
                if not self._tasks:
                    self._fillers -= 1
                    return
                task = self._tasks.popleft()
            task()

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
                    if len(self._checked) * PART_BYTES > 2 * self.limit:
                        self._checked.clear()  # most are of parts that were deleted
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


#: Bytes of a part: a request takes about as long for one byte.
PART_BYTES = 1 << 20

#: Parts that a process fetches at the same time: of a batch, and of the rest.
FETCHED_AT_ONCE, REST_AT_ONCE = 32, 4

#: Seconds that `close` waits for a part.
CLOSE_SECONDS = 5.0


#: Bytes that have a checksum, of which a part is a multiple; and bytes of a checksum, a CRC-32.
BLOCK_BYTES, SUM_BYTES = 1 << 13, 4


def num_blocks(size: int) -> int:
    """Return the number of blocks in some bytes."""
    return -(-size // BLOCK_BYTES)


def checksums_of(content: bytes) -> bytes:
    """Return the checksums of the blocks of some content, one after another."""
    view, starts = memoryview(content), range(0, len(content), BLOCK_BYTES)
    sums = (zlib.crc32(view[start : start + BLOCK_BYTES]) for start in starts)
    return b"".join(one.to_bytes(SUM_BYTES, "little") for one in sums)


class ObjectDamaged(RunError):
    """An object is not what was written, or has been replaced while it was read."""


class CachedObject:
    """The content of an object. May be used from any thread.

    If its parts are kept in the cache, whole ones are read. Otherwise, what is asked for is read,
    in whole blocks.
    """

    def __init__(
        self,
        objects: Objects,
        name: str,
        size: int,
        stamp: Stamp,
        cache: PartCache,
        checksums: Callable[[int, int], bytes] | None = None,
        kept: bool = True,
    ):
        """
        Args:     size, stamp: of the object, which must not change. checksums: returns those of a
                  range of blocks; None if they are not known. kept: whether parts are kept in the
                  cache. Then the first call of `checksums` reads all of them.
        """
        self._objects, self._name, self._stamp, self._cache = objects, name, stamp, cache
        self.size, self._checksums, self._kept = size, checksums, kept
        about = f"{objects.address} {name} {size} {stamp.e_tag} {stamp.version}"
        self._key = hashlib.sha256(about.encode()).hexdigest()[:32]
        self._filling, self._stopped, self._ended = 0, False, threading.Condition()

    @property
    def place(self) -> str:
        """The address of the object."""
        return f"{self._objects.address}/{self._name}"

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return -(-self.size // PART_BYTES)

    def begin(self, spans: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        """Begin to fetch spans, (first, last), many at a time.

        Returns:  what waits for them and returns their bytes. Raises ObjectDamaged, StoreError.
        """
        if self._kept:
            numbers = [range(a // PART_BYTES, -(-b // PART_BYTES)) for a, b in spans]
            parts = self.fetch(sorted(set(itertools.chain(*numbers))))

            def wait() -> list[bytes]:
                deque(parts, 0)
                return [self.read(*span) for span in spans]

            return wait
        pieces = [[*itertools.pairwise([*range(a, b, PART_BYTES), b])] for a, b in spans]
        found = self._cache.pool.map(lambda span: self._blocks(*span), itertools.chain(*pieces))
        return lambda: [b"".join(itertools.islice(found, len(some))) for some in pieces]

    def _blocks(self, first: int, last: int) -> bytes:
        start, stop = first // BLOCK_BYTES, num_blocks(last)
        content = self._fetched(start * BLOCK_BYTES, min(stop * BLOCK_BYTES, self.size))
        return content[first - start * BLOCK_BYTES :][: last - first]

    def read(self, first: int, last: int) -> bytes:
        """Return bytes first to last, by way of the cache.

        Raises:   ObjectDamaged, StoreError.
        """
        found = []
        while first < last:
            number, start = divmod(first, PART_BYTES)
            end = min(start + last - first, PART_BYTES)
            found.append(self._part(number, slice(start, end)))
            first += end - start
        return b"".join(found)

    def fetch(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Begin to fetch those of some parts that are not here, and return an iterator over them.

        Its end is that of the last one. It raises ObjectDamaged, StoreError.
        """
        missing = [number for number in numbers if not self._cache.has(self._key, number)]
        return self._cache.pool.map(lambda number: self._part(number, slice(0, 0)), missing)

    def fetch_all(self, first: int = 0) -> None:
        """Fetch all parts in the background, a few at a time, in order from one of them on.

        After an error it stops: whoever needs a part will meet it.
        """
        with self._ended:
            self._filling += REST_AT_ONCE
        for start in range(REST_AT_ONCE):
            numbers = range(start, self.num_parts, REST_AT_ONCE)
            self._cache.fill(functools.partial(self._fetch_some, first, numbers))

    def _fetch_some(self, first: int, numbers: range) -> None:
        try:
            for number in numbers:
                number = (first + number) % self.num_parts
                if self._stopped:
                    return
                if not self._cache.has(self._key, number):
                    self._part(number, slice(0, 0))
        except (RunError, ConfigError, OSError):
            return
        finally:
            with self._ended:
                self._filling -= 1
                self._ended.notify_all()

    def check(self, sha256: str) -> bytes | None:
        """Read everything once, and return the checksums of the blocks, which are then known.

        Args:     sha256: of the content.
        Returns:  None if it has another content; the checksums stay unknown.
        Raises:   ObjectDamaged, StoreError.
        """
        whole, found = hashlib.sha256(), []
        for first in range(0, self.num_parts, FETCHED_AT_ONCE):
            numbers = range(first, min(first + FETCHED_AT_ONCE, self.num_parts))
            deque(self.fetch(numbers), 0)
            for number in numbers:
                at = number * PART_BYTES
                content = self.read(at, min(at + PART_BYTES, self.size))
                whole.update(content)
                found.append(checksums_of(content))
        if whole.hexdigest() != sha256:
            return None
        sums = b"".join(found)
        self._checksums = lambda first, last: sums[first * SUM_BYTES : last * SUM_BYTES]
        return sums

    def stop(self) -> None:
        """Let what is fetched in the background end after the current part."""
        self._stopped = True

    def close(self) -> None:
        """End what is fetched in the background."""
        self.stop()
        with self._ended:
            self._ended.wait_for(lambda: not self._filling, CLOSE_SECONDS)

    def _part(self, number: int, span: slice) -> bytes:
        if self._checksums is not None:
            self._checksums(0, 0)  # reads them, which it may not do while the part is locked
        first = number * PART_BYTES
        size = min(self.size - first, PART_BYTES)
        fetch = lambda: self._fetched(first, first + size)  # noqa: E731
        return self._cache.read(self._key, number, size, span, fetch)

    def _fetched(self, first: int, last: int) -> bytes:
        """Read whole blocks from the store. Raises:   ObjectDamaged; StoreError."""
        sums = self._checksums
        known = sums(first // BLOCK_BYTES, num_blocks(last)) if sums else b""
        intact = lambda content: not sums or checksums_of(content) == known  # noqa: E731
        try:
            return self._objects.read_range(self._name, first, last, self._stamp, intact)
        except (Missing, Conflict) as error:
            rule = "was deleted or replaced while it was read"
            raise ObjectDamaged(f"{self.place} {rule}. Fix: start again") from error
        except Altered as error:
            where = f"bytes {first:,} to {last:,} of {self.place}"
            rule = "are not what was written. Fix: write the object again"
            raise ObjectDamaged(f"{where} {rule}") from error
