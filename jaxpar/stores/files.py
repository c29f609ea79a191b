"""Files of a run in a store but for checkpoints: whole ones, growing ones, and its sessions.

Config, manifest, records and profiles are uploaded whole. A store cannot append: of a file that
only grows, it has parts named by their ranges of bytes. metrics.jsonl is the objects
metrics.jsonl.parts/000000000000-000000004096 and so on. A reader joins them. When there are MANY of
them, a single object with all bytes replaces them: it is written first, so that a reader always
finds every byte at least once.

A session is one attempt of a run, from taking the lease to releasing it. A folder lists the
sessions that wrote from it. The store names the last one. If it is in the list, nobody else has
written since, and what the folder has beyond the store is the run's own: a killed upload.
"""

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import Address
from jaxpar.runtime.terminal import warn
from jaxpar.stores.objects import Altered, Found, Missing, Objects, can_be_named
from jaxpar.stores.steps import COMPLETE, SHARDS, STEPS

#: The file of a run's folder that lists its sessions, and the object that names the last one.
SESSIONS_FILE, SESSION = ".store_sessions", "session"


def last_session(objects: Objects) -> str:
    """Return the session that wrote a run last; empty for a new run. Raises:   StoreError."""
    try:
        return objects.read(SESSION)[0].decode(errors="replace").strip()
    except Missing:
        return ""


def sessions_of(folder: Path) -> set[str]:
    """Return the sessions that wrote from a folder, and the addresses that it belongs to."""
    file = folder / SESSIONS_FILE
    return set(file.read_text().split()) if file.is_file() else set()


def note(folder: Path, what: str, address: Address) -> None:
    """Record in a folder that it belongs to an address: a session, or a download."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / SESSIONS_FILE, "a") as file:
        file.write(f"{what} {address}\n")


def begin_session(objects: Objects, folder: Path, session: str) -> None:
    """Record a session, first in the folder: a kill in between loses nothing.

    Raises:   StoreError.
    """
    note(folder, session, objects.address)
    objects.write(SESSION, session.encode())


def require_same_run(objects: Objects, folder: Path) -> None:
    """Check that a folder is empty, or belongs to the run of the store.

    Raises:   ConfigError.
    """
    has_run = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if has_run and str(objects.address) not in sessions_of(folder):
        rule = f"contains another run than {objects.address}, which is not empty either"
        raise ConfigError("run.dir", str(folder), rule, "use a new --run.dir or --run.store")


#: Files of a run that only grow.
GROWING = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "expert_loads.jsonl")

#: Number of parts that are joined in the store.
MANY = 100

_RANGE = re.compile("([0-9]{12})-([0-9]{12})")


def ranges(objects: Objects, name: str) -> list[tuple[int, int]]:
    """Return the ranges of a file's parts, by their first byte, the longest first."""
    below = f"{name}.parts/"
    found = (_RANGE.fullmatch(one.name.removeprefix(below)) for one in objects.names(below))
    there = [(int(one[1]), int(one[2])) for one in found if one]
    return sorted(there, key=lambda part: (part[0], -part[1]))


def length(parts: list[tuple[int, int]]) -> int:
    """Return the number of bytes that parts cover from the beginning, without a gap."""
    end = 0
    for first, last in parts:
        if first <= end:
            end = max(end, last)
    return end


def _object(name: str, first: int, last: int) -> str:
    return f"{name}.parts/{first:012}-{last:012}"


def joined(objects: Objects, name: str) -> tuple[bytes, str]:
    """Return the content of a file in a store up to the first damage, and what that is.

    Parts may disappear while this reads, when they are joined: then it starts again.

    Raises:   StoreError.
    """
    content = b""

    def join() -> str:
        nonlocal content
        content = b""
        for first, last in ranges(objects, name):
            if first > len(content):
                return f"{name} has no bytes {len(content):,} to {first:,}"
            if last <= len(content):
                continue
            try:
                part, _ = objects.read(_object(name, first, last))
            except Missing:
                raise Altered(f"{_object(name, first, last)} is missing") from None
            if len(part) != last - first:
                size = f"has {len(part):,} bytes, not {last - first:,}"
                return f"{_object(name, first, last)} {size}"
            content += part[len(content) - first :]
        return ""

    try:
        damage = objects.repeated(f"reading {name}", join)
    except Altered as error:
        damage = str(error)
    return content, damage


class Growing:
    """A growing file of a run's folder, and what of it is in the store."""

    def __init__(self, objects: Objects, folder: Path, name: str):
        self._objects, self._file, self.name = objects, folder / name, name
        self._known: list[tuple[int, int]] | None = None

    @property
    def _parts(self) -> list[tuple[int, int]]:
        if self._known is None:
            there = ranges(self._objects, self.name)
            if length(there) > self._size() or (there and length(there) < there[-1][1]):
                # The folder has what is intact of them (`fetching`): they are replaced by it.
                self._objects.delete([_object(self.name, *part) for part in there])
                there = []
            self._known = there
        return self._known

    def _size(self) -> int:
        return self._file.stat().st_size if self._file.is_file() else 0

    def waiting(self) -> int:
        """Return the number of bytes that are not in the store, as far as is known."""
        return max(self._size() - length(self._known or []), 0)

    def upload(self) -> int:
        """Upload what is new, as one part. Returns:  its bytes. Raises:   StoreError."""
        first = length(self._parts)
        if self._size() <= first:
            return 0
        with open(self._file, "rb") as opened:
            opened.seek(first)
            content = opened.read()
        # Whole lines: a reader in between finds no half of one.
        content = content[: content.rfind(b"\n") + 1]
        if not content:
            return 0
        self._objects.write(_object(self.name, first, first + len(content)), content)
        self._parts.append((first, first + len(content)))
        if len(self._parts) >= MANY:
            self._join()
        return len(content)

    def _join(self) -> None:
        """Replace all parts by one."""
        end = length(self._parts)
        with open(self._file, "rb") as opened:
            content = opened.read(end)
        if len(content) != end:
            return  # the file was deleted meanwhile
        self._objects.write(_object(self.name, 0, end), content)
        old = [part for part in self._parts if part != (0, end)]
        self._objects.delete([_object(self.name, *part) for part in old])
        self._known = [(0, end)]


#: Folders and files that stay on the host: checkpoints and growing files are uploaded otherwise,
#: locks and reports of processes mean nothing elsewhere, sinks have servers of their own.
LEFT_OUT = {
    *(STEPS, COMPLETE, SHARDS, SESSION, "lock", "damaged", "superseded", "ranks", "logs"),
    *("tensorboard", "wandb", "mlruns", "profile.request"),
}


#: Errors of names that cannot be files here: too long, or below a name that is a file.
NO_FILE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EINVAL)


def _is_kept(name: str) -> bool:
    first, last = name.split("/")[0], name.rpartition("/")[2]
    hidden = first.startswith(".") or last.startswith(".") or last.endswith(".tmp")
    return not hidden and first not in LEFT_OUT and name not in GROWING


def _walk(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name, and the size and time of change, of each file to upload."""
    for path in sorted(folder.iterdir()):
        if not _is_kept(path.name):
            continue
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            name = str(file.relative_to(folder))
            if _is_kept(name) and can_be_named(name) and file.is_file():
                about = file.stat()
                yield name, (about.st_size, about.st_mtime_ns)


class Changed:
    """The files of a run's folder, and which have changed since they were uploaded."""

    def __init__(self, objects: Objects, folder: Path):
        self._objects, self._folder = objects, folder
        self._known: dict[str, tuple[int, int]] = {}

    def waiting(self) -> list[str]:
        """Return the names of the files to upload."""
        try:
            return [name for name, about in _walk(self._folder) if self._known.get(name) != about]
        except FileNotFoundError:  # deleted meanwhile
            return []

    def upload(self) -> int:
        """Upload what has changed. Returns:  its bytes. Raises:   StoreError."""
        count, now = 0, dict[str, tuple[int, int]]()
        try:
            now = dict(_walk(self._folder))
        except FileNotFoundError:
            return 0
        for name, about in now.items():
            if self._known.get(name) != about:
                try:
                    count += self._objects.upload(name, self._folder / name).bytes
                except FileNotFoundError:
                    continue
                except PermissionError as error:  # it keeps no other file from the store
                    warn(f"{self._folder / name} is not uploaded: {error.strerror}")
                self._known[name] = about
        return count


def stored_files(objects: Objects, found: list[Found]) -> list[Found]:
    """Return those of a listing of a run that `Changed` has uploaded."""
    return [one for one in found if _is_kept(one.name) and ".parts/" not in one.name]


def download_files(objects: Objects, folder: Path, found: list[Found], again: bool) -> None:
    """Download the files of a run.

    Args:     again: also those that are in the folder. Raises:   StoreError.
    """
    for one in stored_files(objects, found):
        if again or not (folder / one.name).exists():
            try:
                objects.download(one.name, folder / one.name)
            except Missing:
                continue  # deleted meanwhile
            except OSError as error:
                if error.errno not in NO_FILE:
                    raise
                warn(f"{objects.address}/{one.name} is left out: {error.strerror}")
