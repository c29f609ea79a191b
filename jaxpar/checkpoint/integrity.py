"""Integrity of checkpoints: fingerprints of the arrays, and a list of the files.

Orbax detects a truncated file, but loads a flipped bit without an error. Each checkpoint therefore
carries two records:

    fingerprints    of every array, computed on the devices (`sharding/fingerprint.py`). Part of the
                    checkpoint's metadata, so they exist as soon as it does; the metadata is sealed
                    with a digest
    FILES           the size of every file, and the SHA-256 of those up to SMALL. Written just after
                    the checkpoint is complete

A load first verifies the files, then the fingerprints of the arrays it has read.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxpar.config.json_reader import read_json_object
from jaxpar.config.rules.paths import absolute
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic

#: The list of a checkpoint's files, in the same folder.
FILES = "jaxpar_files.json"

#: Larger files are verified only by size: they contain arrays, which have fingerprints.
SMALL = 64 << 20

#: Keys of a checkpoint's metadata.
FINGERPRINTS, SEAL = "fingerprints", "seal"

#: Folder of a run for damaged checkpoints.
DAMAGED = "damaged"

#: Maximum number of damaged items in a message.
MAX_NAMED = 8

#: Errors of the system that indicate damage within a checkpoint: a missing file, or an invalid name
#: or offset, as from a damaged index. All other errors are errors of the machine.
OF_FILES = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EOVERFLOW),
)


#: Begins messages about trouble that is none of the files'.
_TROUBLE = re.compile(
    "(PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|RESOURCE_EXHAUSTED|ABORTED"
    "|CANCELLED|DEADLINE_EXCEEDED)\\b"
)


class Damaged(exit_codes.RunError):
    """A checkpoint differs from what was written."""

    def __init__(self, where: str, damage: Iterable[str]):
        self.damage = list(damage)
        named, more = self.damage[:MAX_NAMED], len(self.damage) - MAX_NAMED
        text = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
        super().__init__(f"{where} is damaged: {text}")


class Unreadable(exit_codes.RunError):
    """A checkpoint cannot be read now because of the machine; it may be intact."""

    code = exit_codes.EXIT_UNREADABLE


@contextlib.contextmanager
def reading_checkpoint(where: str) -> Iterator[None]:
    """Separate errors of the machine from damage while reading a checkpoint.

    Raises:   Unreadable for an error of the machine; all other exceptions pass through.
    """
    try:
        yield
    except Exception as error:
        refuse_trouble(where, error)
        raise


def refuse_trouble(where: str, error: Exception) -> None:
    """Raises:   Unreadable for an error of the machine."""
    trouble = _trouble(error)
    if trouble:
        why = f"{where} cannot be read: {trouble}"
        raise Unreadable(f"{why}. Nothing was moved. Fix the cause, and start again") from error


def _trouble(error: BaseException) -> str:
    """Describe the machine's error behind an exception or its causes; empty if there is none.

    After too many open files, missing permissions or a stale NFS handle, another read may succeed.
    So it may after EIO, which a network file system also returns while its server is late. From a
    failing disk, nothing should be moved.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number not in OF_FILES:
        return str(error)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of TensorStore's messages
    if code and int(code[1]) not in OF_FILES:
        return f"{os.strerror(int(code[1]))} ({str(error).partition(': ')[2][:200]})"
    if _TROUBLE.match(str(error)):  # of TensorStore too
        return str(error).partition("\n")[0][:200]
    within = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    causes = (*within, error.__cause__, error.__context__)
    return next(filter(None, (_trouble(cause) for cause in causes if cause is not None)), "")


def folders_in(place: Path, names: re.Pattern[str]) -> list[str]:
    """Return the names of folders in a place that match a pattern; none without the place.

    Raises:   Unreadable if it, or one of them, cannot be reached. (`Path.is_dir` hides that.)
    """
    try:
        found = [name for name in sorted(os.listdir(place)) if names.fullmatch(name)]
        return [name for name in found if _is_folder(place / name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unreadable(f"{place} cannot be read: {error.strerror}") from error


def _is_folder(place: Path) -> bool:
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except FileNotFoundError:
        if place.is_symlink():
            text = f"{place} cannot be read: it is a link to a folder that is not there"
            raise Unreadable(text) from None
        return False  # deleted meanwhile


# ------------------------------------------------------------------------------ metadata


def seal(about: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a checkpoint, with a digest of it."""
    return about | {SEAL: _digest(about)}


def check_seal(where: str, about: Mapping[str, Any]) -> None:
    """Raises:   Damaged when the metadata does not match its digest, or has none."""
    rest = {key: value for key, value in about.items() if key != SEAL}
    if about.get(SEAL) != _digest(rest):
        raise Damaged(where, ["its metadata does not match its digest"])


def _digest(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------------- files


def write_file_list(
    step_folder: Path, elsewhere: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> None:
    """Write FILES, atomically.

    Args:     elsewhere: files of the checkpoint that are not in the folder: their bytes and sha256.
    """
    files = {name: _entry(step_folder / name) for name in _names(step_folder)}
    for name, entry in elsewhere.items():
        files[name] = {"bytes": entry["bytes"]} if entry["bytes"] > SMALL else dict(entry)
    content = {"files": files}
    text = json.dumps(seal(content), indent=1, sort_keys=True) + "\n"
    atomic.write(step_folder / FILES, text.encode())


def has_file_list(step_folder: Path) -> bool:
    """Whether FILES exists. It does not if the run was killed just after the commit."""
    return _size(step_folder / FILES) is not None


def file_damage(step_folder: Path) -> list[str]:
    """Return which files are missing, or differ from FILES in size or content.

    Empty without FILES.

    Raises:   Unreadable for an error of the machine.
    """
    with reading_checkpoint(str(step_folder)):
        with contextlib.suppress(FileNotFoundError):
            os.scandir(step_folder).close()  # or nothing can be said of its files
        expected = _listed(step_folder)
        if expected is None:
            return [f"{FILES} cannot be read"]
        found = (_difference(step_folder / name, name, then) for name, then in expected.items())
        return [text for text in found if text]


def extra_files(step_folder: Path) -> list[str]:
    """Return files that are not in FILES, such as a file browser's. They are ignored: no damage.

    Raises:   Unreadable for an error of the machine.
    """
    with reading_checkpoint(str(step_folder)):
        expected = _listed(step_folder)
        return [name for name in _names(step_folder) if name not in expected] if expected else []


def _listed(step_folder: Path) -> dict[str, dict[str, Any]] | None:
    """Read FILES: entries by file name. Empty without FILES; None when it is damaged."""
    if not has_file_list(step_folder):
        return {}
    try:
        content = read_json_object(step_folder / FILES)
        check_seal(FILES, content)
    except (ValueError, Damaged):
        return None
    entries = content.get("files")
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        return None
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether a value of FILES has the form that `_entry` returns."""
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int)


def _difference(file: Path, name: str, then: Mapping[str, Any]) -> str:
    """Describe the damage of a file; empty if it is intact."""
    size = _size(file)
    if size is None:
        return f"{name} is missing"
    if size != then["bytes"]:
        return f"{name} has {size:,} bytes, not {then['bytes']:,}"
    return "" if _entry(file) == then else f"{name} has different content"


def _size(file: Path) -> int | None:
    """Return the size of a file; None if it is missing. (`is_file` would hide other errors.)"""
    try:
        found = file.stat()
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _names(step_folder: Path) -> list[str]:
    files = (path for path in sorted(step_folder.rglob("*")) if path.is_file())
    names = (str(path.relative_to(step_folder)) for path in files)
    return sorted(name for name in names if not name.startswith((FILES, f".{FILES}")))


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > SMALL:
        return {"bytes": size}
    with open(file, "rb") as opened:
        return {"bytes": size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


# -------------------------------------------------------------------------------- arrays


def describe_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Describe the arrays in `found` that differ from the expected fingerprints."""
    wrong = [f"{name} has no saved fingerprint" for name in found if name not in expected]
    for name, sums in found.items():
        if name in expected and sums != expected[name]:
            wrong.append(f"{name} has fingerprint {sums}, not {expected[name]}")
    return wrong


def set_aside(run_dir: str | Path, step_folder: Path, why: str) -> Path:
    """Move a damaged checkpoint to RUN/damaged. Nothing is deleted.

    Returns:  its new path. A file next to it contains the reason.
    """
    place = absolute(run_dir) / DAMAGED
    place.mkdir(exist_ok=True)
    name = step_folder.name
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    taken = {path.name for path in place.iterdir()}
    to = next(place / name for name in names if not {name, f"{name}.txt"} & taken)
    shutil.move(step_folder, to)
    to.with_name(to.name + ".txt").write_text(why + "\n", encoding="utf-8")
    return to
