"""Atomic writes: a file is replaced completely or not at all."""

import os
import tempfile
from pathlib import Path


def write(path: Path | str, content: bytes) -> None:
    """Write a temporary file and rename it to `path`. Devices and pipes are written directly.

    Raises:   OSError that names `path`; the temporary file is deleted.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        _replace(Path(os.path.realpath(target)), content)  # keep symbolic links
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _replace(target: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp sets 0o600
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
