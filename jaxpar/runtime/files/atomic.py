"""The only way in which a file or folder is replaced: completely or not at all.

What is written appears under its name after its content has reached the disk, and the name reaches
the disk before the call returns. So after a power failure there is the old content or the new one,
never an empty file. `tests/meta/test_atomic.py` refuses any other rename.

Temporary files begin with "." and end with ".tmp". They are created as any file is: the kernel
applies the umask.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

#: Errors of a flush that mean lost data. Some file systems cannot flush folders, or do not allow
#: them to be opened: they report others.
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def write(path: Path | str, content: bytes) -> None:
    """Write a temporary file and rename it to `path`. Devices and pipes are written directly.

    Raises:   OSError that names `path`; the temporary file is deleted.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        with new_file(target) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def create(path: Path, content: bytes, mode: int = 0o666) -> bool:
    """Write a file, with all of its content from the first moment, unless there is one.

    Args:     mode: its permissions, before the umask.
    Returns:  whether it was written: of several processes that try, one writes it.
    Raises:   OSError.
    """
    temporary = temporary_name(path)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
        _flush(path.parent)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def new_file(path: Path | str, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary file that becomes `path` if the block succeeds.

    Otherwise it is deleted. A symbolic link is kept: the file that it leads to is replaced.

    Args:     durable: flush to the disk. False for caches, whose files have checksums.
    Raises:   OSError.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_name(target)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        publish(temporary, target, durable)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `folder` if the block succeeds.

    Otherwise it is deleted. `folder` must not exist then, or be empty.

    Raises:   OSError.
    """
    target = Path(os.path.realpath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return a name, next to a path, that no other call returns."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}.tmp")


def publish(complete: Path, path: Path, durable: bool = True) -> None:
    """Flush a complete file or folder to the disk, and rename it to `path` on the same disk.

    Raises:   OSError; then `path` is as it was.
    """
    if durable:
        _flush_all(complete)
    os.replace(complete, path)
    if durable:
        _flush(path.parent)


def move(path: Path, to: Path) -> None:
    """Rename a file or folder, whose content stays, on the same disk. Raises:   OSError."""
    os.replace(path, to)
    for folder in dict.fromkeys((path.parent, to.parent)):
        _flush(folder)


def _flush_all(place: Path) -> None:
    """Flush a file, or all that is in a folder, to the disk."""
    for folder, _, names in sorted(os.walk(place)):
        for name in names:
            _flush(Path(folder, name))
        _flush(Path(folder))
    if not place.is_dir():
        _flush(place)


def _flush(path: Path) -> None:
    """Raises:   OSError if data was lost."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in _LOST:
            raise
