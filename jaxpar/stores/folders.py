"""A folder in a store that is complete or absent: a dataset, or an exported model.

Its files are objects. One of them, without which nobody takes the folder for what it is, is written
last, and deleted first. FILES, which is written first and again before that one, lists the others
with their sizes and SHA-256.
"""

import contextlib
import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import UnreadableJson, read_json
from jaxpar.config.rules.paths import cache_folder, is_address, read_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.lock import locked
from jaxpar.stores.objects import (
    Altered,
    Conflict,
    Content,
    Found,
    Missing,
    Objects,
    list_of_files,
    read_list,
)
from jaxpar.stores.steps import FILES_AT_ONCE

#: The object that lists the files.
FILES = "stored_files.json"

#: The file of a copy that says which versions of the objects its files are.
VERSIONS = ".versions.json"


class InUse(Exception):
    """Another writer has completed a folder at the address."""


def upload_folder(
    objects: Objects,
    folder: Path,
    last: str,
    replace: bool = False,
    sent: Mapping[str, Content] = MappingProxyType({}),
) -> int:
    """Upload a folder, and return its size in bytes.

    Args:     last: the file that is written last. replace: a folder that is there. sent: files of
              it that are uploaded already.
    Raises:   InUse; StoreError.
    """
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert last in names
    there = {found.name for found in objects.names()}
    if last in there:
        if not replace:
            raise InUse
        objects.delete([last])
    objects.write(FILES, list_of_files({}))
    objects.delete(sorted(there - {last, FILES} - set(names) - sent.keys()))
    beside = min(len(names), FILES_AT_ONCE)
    send = lambda name: objects.upload(name, folder / name, beside)  # noqa: E731
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="upload") as pool:
        others = [name for name in names if name != last]
        contents = {**sent, **dict(zip(others, pool.map(send, others), strict=True))}
    objects.write(FILES, list_of_files(contents))
    content = (folder / last).read_bytes()
    try:
        objects.write_if(last, content, None)
    except Conflict:  # the answer of a request that won may be lost
        if objects.read(last)[0] != content:
            raise InUse from None
    return sum(one.bytes for one in contents.values()) + len(content)


def listed_files(objects: Objects) -> dict[str, Content]:
    """Return the files that `upload_folder` has recorded; empty if it has not written the folder.

    Raises:   Altered if the list is damaged; StoreError.
    """
    try:
        return read_list(objects, FILES)
    except Missing:
        return {}


@contextmanager
def new_folder_at(argument: str, text: str, last: str) -> Iterator[Path]:
    """Yield the path of a new folder. That of an address is uploaded at the end, and deleted here.

    Args:     argument: that holds the path or address, for errors. last: as in `upload_folder`.
    Raises:   ConfigError if the address has objects, but for those of a killed upload; StoreError.
    """
    if not is_address(text):
        yield Path(text)
        return
    address = read_address(argument, text)
    objects = Objects(address, argument)
    in_use = ConfigError(argument, text, "already exists, and is not empty", "use a new address")
    names = {found.name for found in objects.names(exact=True)}
    if names and (FILES not in names or last in names):
        raise in_use
    mark = hashlib.sha256(str(address).encode()).hexdigest()[:12]
    above = cache_folder("writing") / mark
    shutil.rmtree(above, ignore_errors=True)
    above.mkdir(parents=True)
    try:
        yield above / address.prefix.rpartition("/")[2]
        upload_folder(objects, above / address.prefix.rpartition("/")[2], last)
    except InUse:
        raise in_use from None
    finally:
        shutil.rmtree(above, ignore_errors=True)


def update_copy(
    objects: Objects,
    folder: Path,
    found: Sequence[Found],
    there: Set[str],
    check: Callable[[list[str]], None] = lambda names: None,
) -> None:
    """Bring the copy of a folder up to date. One process at a time does so.

    Args:     found: the objects to copy. there: all objects; copies of others are deleted. check:
              called with the names of those that were copied now; it may raise.
    Raises:   RunError if an object is damaged or missing; StoreError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        try:
            recorded = listed_files(objects)
        except Altered as error:
            raise _damaged(objects, str(error)) from error
        known = folder / VERSIONS
        before = {}
        with contextlib.suppress(OSError, UnreadableJson):  # then all is copied again
            before = read_json(known)
        before = before if isinstance(before, dict) else {}
        about = lambda one: [one.size, one.e_tag, _changed(folder / one.name)]  # noqa: E731
        late = [one.name for one in found if about(one) != before.get(one.name)]
        copy = lambda name: _download(objects, name, folder / name, recorded.get(name))  # noqa: E731
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="copy") as pool:
            deque(pool.map(copy, late), 0)
        check(late)
        for old in sorted(set(before) - there):
            (folder / old).unlink(missing_ok=True)
        kept = {name: one for name, one in before.items() if name in there}
        now = {one.name: about(one) for one in found}
        atomic.write(known, json.dumps(kept | now).encode())


def _changed(file: Path) -> int | None:
    """Return the time of a file's last change; None if there is none."""
    return file.stat().st_mtime_ns if file.is_file() else None


def _download(objects: Objects, name: str, file: Path, expected: Content | None) -> None:
    try:
        objects.download(name, file, expected)
    except Altered as error:
        raise _damaged(objects, str(error)) from error
    except Missing:
        raise _damaged(objects, f"{name} is missing") from None


def _damaged(objects: Objects, why: str) -> RunError:
    return RunError(f"{objects.address} is damaged: {why}. Fix: write it again")
