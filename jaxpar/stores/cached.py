"""An object of a store that is read by parts, through a cache on this host."""

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import RunError
from jaxpar.stores.cache import DIGEST_BYTES, PartCache, digest_of
from jaxpar.stores.objects import Altered, Conflict, Missing, Objects, Stamp

#: Bytes of a part: a request takes about as long for one byte.
PART_BYTES = 1 << 20

#: Parts that a process fetches at the same time: of a batch, and of the rest.
PARTS_AT_ONCE, REST_AT_ONCE = 32, 4

#: Seconds that `close` waits for a part.
CLOSE_SECONDS = 5.0


def digests_of(file: Path) -> bytes:
    """Return the digests of the parts of a file, one after another."""
    with open(file, "rb") as opened:
        return b"".join(map(digest_of, iter(lambda: opened.read(PART_BYTES), b"")))


class ObjectDamaged(RunError):
    """An object is not what was written, or has been replaced while it was read."""


class CachedObject:
    """The content of an object, read by parts. May be used from any thread."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        size: int,
        stamp: Stamp,
        cache: PartCache,
        digests: bytes = b"",
    ):
        """
        Args:     size, stamp: of the object, which must not change. digests: of its parts, one
                  after another; empty if they are not known.
        """
        self._objects, self._name, self._stamp, self._cache = objects, name, stamp, cache
        self.size, self._digests = size, digests
        about = f"{objects.address} {name} {size} {stamp.e_tag} {stamp.version}"
        self._key = hashlib.sha256(about.encode()).hexdigest()[:32]
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="parts")
        self._stopped, self._threads = threading.Event(), list[threading.Thread]()

    @property
    def place(self) -> str:
        """The address of the object."""
        return f"{self._objects.address}/{self._name}"

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return -(-self.size // PART_BYTES)

    def read(self, first: int, last: int) -> bytes:
        """Return bytes first to last.

        Raises:   ObjectDamaged, StoreError.
        """
        found = []
        while first < last:
            number, start = divmod(first, PART_BYTES)
            end = min(start + last - first, PART_BYTES)
            found.append(self._part(number, slice(start, end)))
            first += end - start
        return b"".join(found)

    def fetch(self, numbers: Iterable[int]) -> None:
        """Fetch those of some parts that are not here, many at a time.

        Raises:   ObjectDamaged, StoreError.
        """
        missing = [number for number in numbers if not self._cache.has(self._key, number)]
        for _ in self._pool.map(lambda number: self._part(number, slice(0, 0)), missing):
            pass

    def fetch_all(self, first: int = 0) -> None:
        """Fetch all parts in the background, a few at a time, in order from one of them on.

        After an error it stops: whoever needs a part will meet it.
        """

        def fetch(numbers: range) -> None:
            for number in numbers:
                number = (first + number) % self.num_parts
                if self._stopped.is_set():
                    return
                if not self._cache.has(self._key, number):
                    try:
                        self._part(number, slice(0, 0))
                    except (RunError, ConfigError, OSError):
                        return

        for start in range(REST_AT_ONCE):
            numbers = range(start, self.num_parts, REST_AT_ONCE)
            name = f"rest-{start}"
            thread = threading.Thread(target=fetch, args=(numbers,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def check(self, sha256: str) -> bytes | None:
        """Read everything once, and return the digests of the parts, which are then known.

        Args:     sha256: of the content.
        Returns:  None if it has another content; the digests stay unknown.
        Raises:   ObjectDamaged, StoreError.
        """
        whole, digests = hashlib.sha256(), []
        for first in range(0, self.num_parts, PARTS_AT_ONCE):
            numbers = range(first, min(first + PARTS_AT_ONCE, self.num_parts))
            self.fetch(numbers)
            for number in numbers:
                at = number * PART_BYTES
                content = self.read(at, min(at + PART_BYTES, self.size))
                whole.update(content)
                digests.append(digest_of(content))
        if whole.hexdigest() != sha256:
            return None
        self._digests = b"".join(digests)
        return self._digests

    def close(self) -> None:
        """End what is fetched in the background."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._pool.shutdown(wait=False)

    def _part(self, number: int, span: slice) -> bytes:
        first = number * PART_BYTES
        size = min(self.size - first, PART_BYTES)
        fetch = lambda: self._fetched(number, first, first + size)  # noqa: E731
        return self._cache.read(self._key, number, size, span, fetch)

    def _fetched(self, number: int, first: int, last: int) -> bytes:
        """Read a part from the store. Raises:   ObjectDamaged; StoreError."""
        at = number * DIGEST_BYTES
        digest = self._digests[at : at + DIGEST_BYTES]
        intact = lambda content: not digest or digest == digest_of(content)  # noqa: E731
        try:
            return self._objects.read_range(self._name, first, last, self._stamp, intact)
        except (Missing, Conflict) as error:
            rule = "was deleted or replaced while it was read"
            raise ObjectDamaged(f"{self.place} {rule}. Fix: start again") from error
        except Altered as error:
            where = f"bytes {first:,} to {last:,} of {self.place}"
            rule = "are not what was written. Fix: write the object again"
            raise ObjectDamaged(f"{where} {rule}") from error
