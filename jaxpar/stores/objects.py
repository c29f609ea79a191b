"""Reads and writes objects of a store, with retries, and errors that say what to do.

What fails by an error of the network or the server, or arrives altered, is tried again here, and
nowhere else, with exponential backoff and jitter, for PATIENT_SECONDS or SHORT_SECONDS in all. The
client repeats single requests within that time, such as those of a part of a large file; ATTEMPTS
is a bound on what it does not repeat. Errors that no retry can mend (no permission, no such bucket)
end at once. The client is obstore.
"""

import bisect
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.config.errors import require_package
from jaxpar.config.json_reader import read_json
from jaxpar.config.rules.paths import Address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic

#: Seconds of one HTTP request, and of connecting.
REQUEST_SECONDS, CONNECT_SECONDS = 60, 10

#: Retries of a request by the client, with up to 10 s between them.
REQUEST_RETRIES = 10


def obstore() -> Any:
    """Return the client's module."""
    import obstore  # optional, and few programs need it
    import obstore.exceptions

    return obstore


def open_store(address: Address, seconds: float) -> Any:
    """Return a client of an address, by the settings of the environment.

    Args:     seconds: after which a request is not repeated.
    """
    from obstore import store

    client: Any = {
        "timeout": timedelta(seconds=min(REQUEST_SECONDS, seconds)),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
    }
    retry: Any = {
        "max_retries": REQUEST_RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
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


#: Seconds after which nothing is tried again: for a run and its data; for a command that reads a
#: few small files while somebody waits.
PATIENT_SECONDS, SHORT_SECONDS = 180.0, 20.0

#: Calls before an error is raised, and the seconds before the second one; doubled each time.
ATTEMPTS, BACKOFF_SECONDS = 4, 1.0

#: Bytes of a part of an upload; more for files that would have more than MAX_PARTS of them, up to
#: the most that stores take.
PART_BYTES, MAX_PARTS, MAX_PART_BYTES = 16 << 20, 9000, 5 << 30

#: Parts that are sent at the same time, of all files together. More would share a slow link, and
#: each take longer than REQUEST_SECONDS (docs/experiments.md#parts-in-flight).
PARTS_AT_ONCE = 16

#: Bytes of a download between two writes to the disk.
CHUNK_BYTES = 8 << 20


#: Marks the form of a list of files.
FORMAT = 1


def parts_of_upload(size: int, beside: int = 1) -> tuple[int, int]:
    """Return the bytes of a part of a file, and how many are sent at the same time.

    Larger parts are fewer at a time, since they wait in memory. Args:     beside: as `upload`.
    """
    part = max(PART_BYTES, -(-size // MAX_PARTS))
    return part, max(PARTS_AT_ONCE * PART_BYTES // part // beside, 1)


class StoreError(RunError):
    """A store cannot be reached, or fails, after all retries."""


class Missing(Exception):
    """There is no such object."""


class Conflict(Exception):
    """The object exists already, or was changed by another writer."""


class OddName(ConfigError):
    """An object has a name that the client cannot represent: its folder cannot be listed."""


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
    e_tag: str | None = None


class Content(NamedTuple):
    """The size and SHA-256 of a file."""

    bytes: int
    sha256: str


class Objects:
    """The objects below an address. Names are relative to it. May be used from any thread."""

    def __init__(self, address: Address, field: str, *, patient: bool = True):
        """Reads the settings of the environment; sends nothing yet.

        Args:     field: the setting that holds the address, for errors. patient: whether to try
                  again for PATIENT_SECONDS, or for SHORT_SECONDS.
        Raises:   ConfigError if the library is missing, or a setting is invalid.
        """
        require_package("obstore", field, str(address))
        self.address, self._field = address, field
        self._seconds = PATIENT_SECONDS if patient else SHORT_SECONDS
        #: Set to give up: no retry follows.
        self.stopped = threading.Event()
        try:
            self._store = self._reporting(lambda: open_store(address, self._seconds))
        except _Passing as error:
            fix = "correct the store's settings in the environment, such as its credentials"
            raise self._refused(f"cannot be opened ({error})", fix) from error

    def read(self, name: str) -> tuple[bytes, Stamp]:
        """Return an object's content and version. Raises:   Missing, StoreError."""

        def read() -> tuple[bytes, Stamp]:
            found = obstore().get(self._store, name)
            return bytes(found.bytes()), Stamp(found.meta["e_tag"], found.meta["version"])

        return self._retried(f"reading {name}", read)

    def about(self, name: str) -> tuple[int, Stamp]:
        """Return an object's size and version. Raises:   Missing, StoreError."""

        def look() -> tuple[int, Stamp]:
            found = obstore().head(self._store, name)
            return found["size"], Stamp(found["e_tag"], found["version"])

        return self._retried(f"looking at {name}", look)

    def read_range(
        self,
        name: str,
        first: int,
        last: int,
        stamp: Stamp,
        is_intact: Callable[[bytes], bool] = lambda _: True,
    ) -> bytes:
        """Return bytes first to last of an object, if it is the given version.

        Raises:   Missing; Conflict if it has been replaced; Altered; StoreError.
        """
        options: Any = {"range": (first, last)}
        if stamp.e_tag is not None:
            options["if_match"] = stamp.e_tag

        def read() -> bytes:
            content = bytes(obstore().get(self._store, name, options=options).bytes())
            if len(content) != last - first or not is_intact(content):
                raise Altered(f"bytes {first:,} to {last:,} of {name} have different content")
            return content

        return self._retried(f"reading {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, replacing one of this name. Raises:   StoreError."""
        self._retried(f"writing {name}", lambda: obstore().put(self._store, name, content))

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
            done = obstore().put(self._store, name, content, mode=mode)
            return Stamp(done["e_tag"], done["version"])

        return self._retried(f"writing {name}", write)

    def upload(self, name: str, file: Path, beside: int = 1) -> Content:
        """Write a file's content to an object, and return its size and SHA-256.

        Args:     beside: files that are sent at the same time, this one included.
        Raises:   FileNotFoundError if the file is gone; ConfigError if it is too large; StoreError.
        """
        part, at_once = parts_of_upload(size := file.stat().st_size, beside)
        if part > MAX_PART_BYTES:
            rule = f"cannot have {name}: its {size:,} bytes are more than an object may have"
            raise self._refused(rule, f"write files of at most {MAX_PART_BYTES * MAX_PARTS:,}")
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()

        def send() -> None:
            obstore().put(self._store, name, file, chunk_size=part, max_concurrency=at_once)

        self._retried(f"uploading {name}", send, gone=lambda: not file.is_file())
        return Content(size, digest)

    def download(self, name: str, file: Path, expected: Content | None = None) -> None:
        """Write an object's content to a file, which appears when it is complete.

        Raises:   Missing; Altered if it is not the expected content; StoreError.
        """

        def receive(temporary: Path) -> None:
            digest, size = hashlib.sha256(), 0
            with open(temporary, "wb") as opened:
                for chunk in obstore().get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                    size += opened.write(chunk)
                    digest.update(chunk)
            there = Content(size, digest.hexdigest())
            if expected is not None and there != expected:
                raise Altered(_difference(name, there, expected))

        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic.new_file(file) as temporary:
            self._retried(f"downloading {name}", lambda: receive(temporary))

    def names(self, folder: str = "", exact: bool = False) -> list[Found]:
        """Return all objects below a name that ends in "/", or all.

        Names that no file can have are left out, such as the empty objects, whose names end in "/",
        that a console makes for a folder.

        Args:     exact: also for folders that have nothing else. The client leaves out the "/", so
                  that takes a request for each empty object.
        Raises:   OddName; StoreError.
        """

        def listed() -> list[Found]:
            chunks = obstore().list(self._store, folder or None, chunk_size=1000)
            found = [_found(one) for chunk in chunks for one in chunk]
            return [one for one in found if can_be_named(one.name) and one.name.startswith(folder)]

        found = sorted(self._retried(f"listing {folder or 'objects'}", listed))
        return [one for one in found if one.size or self._is_file(one.name, found, exact)]

    def _is_file(self, name: str, others: list[Found], exact: bool) -> bool:
        """Whether an empty object has a name without "/" at its end."""
        after = bisect.bisect_left(others, Found(f"{name}/", 0))
        if after < len(others) and others[after].name.startswith(f"{name}/"):
            return False
        try:
            return not exact or bool(self.about(name))
        except Missing:
            return False

    def level(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the objects in one that ends in "/", or in the
        address. Raises:   OddName; StoreError."""

        def listed() -> tuple[list[str], list[str]]:
            found = obstore().list_with_delimiter(self._store, folder or None)
            names = (one["path"] for one in found["objects"])
            folders = (name.rstrip("/") for name in found["common_prefixes"])
            names = (name for name in names if name.startswith(folder))
            return sorted(filter(can_be_named, folders)), sorted(filter(can_be_named, names))

        return self._retried(f"listing {folder or 'objects'}", listed)

    def delete(self, names: list[str]) -> None:
        """Delete objects; those that do not exist are ignored. Raises:   StoreError."""
        for first in range(0, len(names), 1000):
            some = names[first : first + 1000]
            with contextlib.suppress(Missing):  # of another attempt
                self._retried("deleting", functools.partial(obstore().delete, self._store, some))

    def _retried[T](
        self, what: str, call: Callable[[], T], gone: Callable[[], bool] = lambda: False
    ) -> T:
        wait, began = BACKOFF_SECONDS, time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._reporting(call, gone)
            except (_Passing, Altered) as error:
                why = error
                pause = wait * random.uniform(0.5, 1.0)
                late = time.monotonic() + pause - began > self._seconds
                if attempt == ATTEMPTS or late or self.stopped.wait(pause):
                    break
                wait *= 2
        if isinstance(why, Altered):
            raise why
        seconds = f"{attempt} times in {time.monotonic() - began:.0f} s"
        raise StoreError(f"{self.address}: {what} failed {seconds}: {why}")

    def repeated[T](self, what: str, call: Callable[[], T]) -> T:
        """Call again, as after an altered answer, while `call` raises Altered.

        Raises:   Altered, in the end; StoreError.
        """
        return self._retried(what, call)

    def _reporting[T](self, call: Callable[[], T], gone: Callable[[], bool] = lambda: False) -> T:
        """Call, and translate the library's errors.

        Raises:   Missing, Conflict, ConfigError, FileNotFoundError if `gone`, or _Passing.
        """
        errors = obstore().exceptions
        try:
            return call()
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise Conflict(str(error)) from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            fix = "give the credentials of the store permission to read, list, write and delete"
            raise self._refused(f"is not allowed ({_short(error)})", fix) from error
        except errors.InvalidPathError as error:
            found = re.search(r'[Pp]ath "(.*?)"', str(error))
            rule = f"has an object {found[1] if found else ''!r}, whose name no file can have"
            fix = "delete that object, for example by `aws s3api delete-object`"
            raise OddName(self._field, str(self.address), rule, fix) from error
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
    return Found(about["path"], about["size"], modified, about["e_tag"])


def can_be_named(name: str) -> bool:
    """Whether a name can be that of a file below a folder, here and in a store."""
    plain = name.isprintable() or not any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name)
    return plain and not set(name.split("/")) & {"", ".", ".."}


class _Passing(Exception):
    """An error after which another call may succeed."""


#: Answers that another request would get again.
_FORBIDDEN = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _difference(name: str, there: Content, expected: Content) -> str:
    if there.bytes != expected.bytes:
        return f"{name} has {there.bytes:,} bytes, not {expected.bytes:,}"
    return f"{name} has different content"


def list_of_files(contents: Mapping[str, Content], **more: Any) -> bytes:
    """Return the content of an object that lists others, for `read_list`."""
    files = {name: content._asdict() for name, content in contents.items()}
    about = {"format": FORMAT, "files": files, **more}
    return json.dumps(about, indent=1, sort_keys=True).encode()


def read_list(objects: Objects, name: str) -> dict[str, Content]:
    """Return what an object of `list_of_files` lists.

    Raises:   Missing; Altered if it is damaged; StoreError.
    """
    content, _ = objects.read(name)  # a refusal, which is a ValueError too, is no damage
    try:
        about = read_json(content, what="it")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError("is no list of files")
        return dict(content_of(about.get("files")))
    except ValueError as error:
        raise Altered(f"{name} {error}") from error


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
