"""Is a checkpoint what was written? Fingerprints of its arrays, and a list of its files.

Orbax notices a truncated file, and loads a flipped bit without a word. Two witnesses are kept:

    fingerprints    in the checkpoint's own metadata, so there as soon as it is: of every array,
                    computed on the devices (`sharding/fingerprint.py`); under a seal, with all that
                    the checkpoint says about itself
    FILES           written a moment after: every file's size, and the SHA-256 of those up to SMALL

A load compares the fingerprints of what it has read, and before that the files.
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
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpar.runtime import exit_codes

#: The list of a checkpoint's files, beside them.
FILES = "jaxpar_files.json"

#: Larger files are told by their size alone: what is in them are arrays, which have fingerprints.
SMALL = 64 << 20

#: Keys of a checkpoint's metadata.
FINGERPRINTS, SEAL = "fingerprints", "seal"

#: Folder of a run with the checkpoints that were found damaged.
DAMAGED = "damaged"

#: How much of the damage a message names.
MAX_NAMED = 8

#: What the system says of a file that is gone or is none, or of a name or an offset that makes no
#: sense, as a damaged index has them. Its other errors are about the machine.
OF_FILES = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EOVERFLOW),
)


class Damaged(exit_codes.RunError):
    """A checkpoint is not what was written."""

    def __init__(self, where: str, damage: Iterable[str]):
        self.damage = list(damage)
        named, more = self.damage[:MAX_NAMED], len(self.damage) - MAX_NAMED
        text = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
        super().__init__(f"{where} is damaged: {text}")


class Unreadable(exit_codes.RunError):
    """A checkpoint cannot be read here and now, which says nothing about what was written."""


@contextlib.contextmanager
def reading_checkpoint(where: str) -> Iterator[None]:
    """Reads of a checkpoint, in which the machine's own trouble is told from damage.

    Raises:   Unreadable for it; whatever else is raised within stays as it is.
    """
    try:
        yield
    except Exception as error:
        refuse_trouble(where, error)
        raise


def refuse_trouble(where: str, error: Exception) -> None:
    """Raises:   Unreadable when an error is the machine's own trouble."""
    trouble = _trouble(error)
    if trouble:
        why = f"{where} cannot be read: {trouble}"
        raise Unreadable(f"{why}. Nothing was moved; mend that, and start again") from error


def _trouble(error: BaseException) -> str:
    """What an error, or one that it comes from, says of the machine; empty for nothing.

    Too many open files, no rights, a stale NFS handle: another read may succeed. So may one after
    EIO, which is also what a network's file system says when its server is late; and from a disk
    that fails, nothing should be moved.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number not in OF_FILES:
        return str(error)
    told = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore ends its messages
    if told and int(told[1]) not in OF_FILES:
        return f"{os.strerror(int(told[1]))} ({str(error).partition(': ')[2][:200]})"
    within = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    causes = (*within, error.__cause__, error.__context__)
    return next(filter(None, (_trouble(cause) for cause in causes if cause is not None)), "")


# ------------------------------------------------------------------------------ metadata


def seal(about: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says about itself, with a digest of it."""
    return about | {SEAL: _digest(about)}


def check_seal(where: str, about: Mapping[str, Any]) -> None:
    """Raises:   Damaged when the metadata is not what was sealed. Without a seal: nothing."""
    if SEAL in about:
        rest = {key: value for key, value in about.items() if key != SEAL}
        if about[SEAL] != _digest(rest):
            raise Damaged(where, ["its metadata is not what was sealed"])


def _digest(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------------- files


def write_file_list(step_folder: Path) -> None:
    """Write FILES, at once or not at all."""
    content = {"files": {name: _entry(step_folder / name) for name in _names(step_folder)}}
    temporary = step_folder / (FILES + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(seal(content), indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(step_folder / FILES)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def has_file_list(step_folder: Path) -> bool:
    """Whether FILES is there. A run killed between the commit and its writing leaves none."""
    return _size(step_folder / FILES) is not None


def file_damage(step_folder: Path) -> list[str]:
    """What FILES says is missing, or of another size or content; empty without one.

    Raises:   Unreadable when the machine cannot tell.
    """
    with reading_checkpoint(str(step_folder)):
        expected = _listed(step_folder)
        if expected is None:
            return [f"{FILES} cannot be read"]
        found = (_difference(step_folder / name, name, then) for name, then in expected.items())
        return [text for text in found if text]


def extra_files(step_folder: Path) -> list[str]:
    """Files that FILES does not know, such as a file browser's: no damage, since none is read.

    Raises:   Unreadable when the machine cannot tell.
    """
    with reading_checkpoint(str(step_folder)):
        expected = _listed(step_folder)
        return [name for name in _names(step_folder) if name not in expected] if expected else []


def _listed(step_folder: Path) -> dict[str, dict[str, Any]] | None:
    """The files of a checkpoint by name, as FILES has them: none without it; None when damaged."""
    if not has_file_list(step_folder):
        return {}
    try:
        content = json.loads((step_folder / FILES).read_bytes())
        check_seal(FILES, content)
        return dict(content["files"])
    except (ValueError, KeyError, TypeError, Damaged):
        return None


def _difference(file: Path, name: str, then: Mapping[str, Any]) -> str:
    """What is wrong with a file, in words; empty for nothing."""
    size = _size(file)
    if size is None:
        return f"{name} is missing"
    if size != then["bytes"]:
        return f"{name} has {size:,} bytes, not {then['bytes']:,}"
    return "" if _entry(file) == then else f"{name} has another content"


def _size(file: Path) -> int | None:
    """Bytes of a file; None when there is none. (`is_file` says so of one that cannot be asked.)"""
    try:
        found = file.stat()
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _names(step_folder: Path) -> list[str]:
    files = (path for path in step_folder.rglob("*") if path.is_file())
    names = (str(path.relative_to(step_folder)) for path in files)
    return sorted(name for name in names if not name.startswith(FILES))


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > SMALL:
        return {"bytes": size}
    with open(file, "rb") as opened:
        return {"bytes": size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


# -------------------------------------------------------------------------------- arrays


def describe_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What is wrong with arrays, in words; of those expected, `found` may be a part."""
    wrong = [f"{name} is not the array that was saved" for name in found if name not in expected]
    for name, sums in found.items():
        if name in expected and sums != expected[name]:
            wrong.append(f"{name} has fingerprint {sums}, not {expected[name]}")
    return wrong


def set_aside(run_dir: str | Path, step_folder: Path, why: str) -> Path:
    """Move a damaged checkpoint out of the way, to RUN/damaged; nothing is deleted.

    Returns:  where it is now, with the reason in a file beside it.
    """
    place = Path(run_dir).absolute() / DAMAGED
    place.mkdir(exist_ok=True)
    name = step_folder.name
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    taken = {path.name for path in place.iterdir()}
    to = next(place / name for name in names if not {name, f"{name}.txt"} & taken)
    shutil.move(step_folder, to)
    to.with_name(to.name + ".txt").write_text(why + "\n", encoding="utf-8")
    return to


def warn(text: str) -> None:
    """A line that nobody overlooks, on standard error."""
    print(f"WARNING    {text}", file=sys.stderr, flush=True)
