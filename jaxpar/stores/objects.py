"""Reads and writes objects of a store, with retries, and errors that say what to do.

A request is retried after errors of the network and the server, up to REQUEST_RETRIES times within
a call of the library, and such calls up to ATTEMPTS times, with exponential backoff and jitter.
Errors that no retry can mend (no permission, no such bucket) end at once.
"""

import contextlib
import functools
import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.config.packages import require_package
from jaxpar.config.rules.paths import Address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic

#: Seconds of one HTTP request, and of connecting.
REQUEST_SECONDS, CONNECT_SECONDS = 60, 10

#: Retries of a request within a call, and the seconds after which there is no other.
REQUEST_RETRIES, RETRY_SECONDS = 3, 60

#: Calls before an error is raised, and the seconds before the second one; doubled each time.
ATTEMPTS, BACKOFF_SECONDS = 4, 1.0

#: Bytes of a part of an upload; more for files that would have more than MAX_PARTS of them.
PART_BYTES, MAX_PARTS = 16 << 20, 9000

#: Parts that are sent at the same time, of all files together. More would share a slow link, and
#: each take longer than REQUEST_SECONDS (docs/experiments/stores.md#parts-in-flight).
PARTS_AT_ONCE = 16

#: Bytes of a download between two writes to the disk.
CHUNK_BYTES = 8 << 20


class StoreError(RunError):
    """A store cannot be reached, or fails, after all retries."""


class Missing(Exception):
    """There is no such object."""


class Conflict(Exception):
    """The object exists already, or was changed by another writer."""


class Altered(Exception):
    """An object does not have the content that was recorded for it."""


class Stamp(NamedTuple):
    """A version of an object, for a conditional write."""

    e_tag: str | None
    version: str | None


class Found(NamedTuple):
    """An object of a listing."""

    name: str
    size: int
    modified: str = ""
    """Date and time, in the zone of this host."""


class Content(NamedTuple):
    """The size and SHA-256 of a file."""

    bytes: int
    sha256: str


class Objects:
    """The objects below an address. Names are relative to it. May be used from any thread."""

    def __init__(self, address: Address, field: str):
        """Reads the settings of the environment; sends nothing yet.

        Args:     field: the setting that holds the address, for errors.
        Raises:   ConfigError if the library is missing, or a setting is invalid.
        """
        require_package("obstore", field, str(address))
        self.address, self._field = address, field
        #: Set to give up: no retry follows.
        self.stopped = threading.Event()
        try:
            self._store = self._reporting(lambda: _open(address))
        except _Passing as error:
            fix = "correct the store's settings in the environment, such as its credentials"
            raise self._refused(f"cannot be opened ({error})", fix) from error

    def read(self, name: str) -> tuple[bytes, Stamp]:
        """Return an object's content and version. Raises:   Missing, StoreError."""

        def read() -> tuple[bytes, Stamp]:
            found = _obstore().get(self._store, name)
            return bytes(found.bytes()), Stamp(found.meta["e_tag"], found.meta["version"])

        return self._retried(f"reading {name}", read)

    def about(self, name: str) -> tuple[int, Stamp]:
        """Return an object's size and version. Raises:   Missing, StoreError."""

        def look() -> tuple[int, Stamp]:
            found = _obstore().head(self._store, name)
            return found["size"], Stamp(found["e_tag"], found["version"])

        return self._retried(f"looking at {name}", look)

    def read_range(self, name: str, first: int, last: int, stamp: Stamp) -> bytes:
        """Return bytes first to last of an object, if it is the given version.

        Raises:   Missing; Conflict if it has been replaced; StoreError.
        """
        options: Any = {"range": (first, last)}
        if stamp.e_tag is not None:
            options["if_match"] = stamp.e_tag

        def read() -> bytes:
            return bytes(_obstore().get(self._store, name, options=options).bytes())

        return self._retried(f"reading {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, replacing one of this name. Raises:   StoreError."""
        self._retried(f"writing {name}", lambda: _obstore().put(self._store, name, content))

    def write_if(self, name: str, content: bytes, stamp: Stamp | None) -> Stamp:
        """Write an object if it is the given version, or with None, if there is none.

        A request whose answer was lost is sent again, and then conflicts with itself: after
        Conflict, read the object to see whose it is.

        Raises:   Conflict, StoreError.
        """
        mode: Any = "create"
        if stamp is not None:  # None is no value of a key, only of the missing key
            mode = {key: value for key, value in stamp._asdict().items() if value is not None}

        def write() -> Stamp:
            done = _obstore().put(self._store, name, content, mode=mode)
            return Stamp(done["e_tag"], done["version"])

        return self._retried(f"writing {name}", write)

    def upload(self, name: str, file: Path, beside: int = 1) -> Content:
        """Write a file's content to an object, and return its size and SHA-256.

        Args:     beside: files that are sent at the same time, this one included.
        Raises:   FileNotFoundError if the file is gone; StoreError.
        """
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            size = opened.seek(0, os.SEEK_END)
        part, at_once = max(PART_BYTES, -(-size // MAX_PARTS)), max(PARTS_AT_ONCE // beside, 1)

        def send() -> None:
            _obstore().put(self._store, name, file, chunk_size=part, max_concurrency=at_once)

        self._retried(f"uploading {name}", send, gone=lambda: not file.is_file())
        return Content(size, digest)

    def download(self, name: str, file: Path, expected: Content | None = None) -> None:
        """Write an object's content to a file, which appears when it is complete.

        Raises:   Missing; Altered if it is not the expected content; StoreError.
        """

        def receive(temporary: Path) -> Content:
            digest, size = hashlib.sha256(), 0
            with open(temporary, "wb") as opened:
                for chunk in _obstore().get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                    size += opened.write(chunk)
                    digest.update(chunk)
            return Content(size, digest.hexdigest())

        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic.new_file(file) as temporary:
            there = self._retried(f"downloading {name}", lambda: receive(temporary))
            if expected is not None and there != expected:
                raise Altered(_difference(name, there, expected))

    def names(self, folder: str = "") -> list[Found]:
        """Return all objects below a name that ends in "/", or all. Raises:   StoreError.

        Names that no file can have are left out, such as the empty objects, whose names end in "/",
        that a console makes for a folder.
        """

        def listed() -> list[Found]:
            chunks = _obstore().list(self._store, folder or None, chunk_size=1000)
            found = [_found(one) for chunk in chunks for one in chunk]
            return [one for one in found if _is_file(one.name) and one.name.startswith(folder)]

        return sorted(self._retried(f"listing {folder or 'objects'}", listed))

    def level(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the objects in one that ends in "/", or in the
        address. Raises:   StoreError."""

        def listed() -> tuple[list[str], list[str]]:
            found = _obstore().list_with_delimiter(self._store, folder or None)
            names = (one["path"] for one in found["objects"])
            folders = (name.rstrip("/") for name in found["common_prefixes"])
            return sorted(filter(_is_file, folders)), sorted(filter(_is_file, names))

        return self._retried(f"listing {folder or 'objects'}", listed)

    def delete(self, names: list[str]) -> None:
        """Delete objects; those that do not exist are ignored. Raises:   StoreError."""
        for first in range(0, len(names), 1000):
            some = names[first : first + 1000]
            with contextlib.suppress(Missing):  # of another attempt
                self._retried("deleting", functools.partial(_obstore().delete, self._store, some))

    def _retried[T](
        self, what: str, call: Callable[[], T], gone: Callable[[], bool] = lambda: False
    ) -> T:
        wait = BACKOFF_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._reporting(call, gone)
            except _Passing as error:
                why = str(error)
                if attempt == ATTEMPTS or self.stopped.wait(wait * random.uniform(0.5, 1.0)):
                    break
                wait *= 2
        raise StoreError(f"{self.address}: {what} failed {attempt} times: {why}")

    def _reporting[T](self, call: Callable[[], T], gone: Callable[[], bool] = lambda: False) -> T:
        """Call, and translate the library's errors.

        Raises:   Missing, Conflict, ConfigError, FileNotFoundError if `gone`, or _Passing.
        """
        errors = _obstore().exceptions
        try:
            return call()
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise Conflict(str(error)) from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            fix = "give the credentials of the store permission to read, list, write and delete"
            raise self._refused(f"is not allowed ({_short(error)})", fix) from error
        except (errors.BaseError, OSError) as error:
            text = str(error)
            if "NoSuchBucket" in text or "bucket does not exist" in text:
                fix = f"create it, or correct the name {self.address.bucket}"
                raise self._refused("has a bucket that does not exist", fix) from error
            if any(code in text for code in _FORBIDDEN):
                fix = "give the credentials of the store permission to read, list, write and delete"
                raise self._refused(f"is not allowed ({_short(error)})", fix) from error
            if isinstance(error, FileNotFoundError):
                if gone():
                    raise
                raise Missing(text) from error
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of this host's disk
            raise _Passing(_short(error)) from error

    def _refused(self, rule: str, fix: str) -> ConfigError:
        return ConfigError(self._field, str(self.address), rule, fix)


def _found(about: Any) -> Found:
    modified = about["last_modified"].astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return Found(about["path"], about["size"], modified)


def _is_file(name: str) -> bool:
    """Whether the name of an object is that of a file below a folder."""
    return not set(name.split("/")) & {"", ".", ".."} and "\0" not in name


class _Passing(Exception):
    """An error after which another call may succeed."""


#: Answers that another request would get again.
_FORBIDDEN = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch")


def _obstore() -> Any:
    import obstore  # optional, and few programs need it
    import obstore.exceptions

    return obstore


def _open(address: Address) -> Any:
    from obstore import store

    client: Any = {
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
    }
    retry: Any = {
        "max_retries": REQUEST_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {
            "init_backoff": timedelta(milliseconds=200),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }
    more: Any = {"prefix": address.prefix, "client_options": client, "retry_config": retry}
    if address.scheme == "gs":
        # The variable of Google's clients for a server in place of theirs.
        client["allow_http"] = os.environ.get("STORAGE_EMULATOR_HOST", "").startswith("http://")
        return store.GCSStore(address.bucket, **more)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        more["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    return store.S3Store(address.bucket, **more)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _difference(name: str, there: Content, expected: Content) -> str:
    if there.bytes != expected.bytes:
        return f"{name} has {there.bytes:,} bytes, not {expected.bytes:,}"
    return f"{name} has different content"


def content_of(values: Any) -> Iterator[tuple[str, Content]]:
    """Yield the names and contents of a record {name: {"bytes": int, "sha256": str}}.

    Raises:   ValueError if it has another form.
    """
    if not isinstance(values, dict):
        raise ValueError("is no list of files")
    for name, value in values.items():
        match value:
            case {"bytes": int(size), "sha256": str(digest)}:
                yield name, Content(size, digest)
            case _:
                raise ValueError(f"has no size and digest of {name}")
