"""A file that is written whole, or not at all: what was there before stays until it is."""

import os
import tempfile
from pathlib import Path


def write(path: Path | str, content: bytes) -> None:
    """Write a file beside `path`, then put it in its place. Devices and pipes are written to.

    Raises:   OSError that names the path, whichever file it was about; nothing is left behind.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        _replace(Path(os.path.realpath(target)), content)  # a link stays one
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _replace(target: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's own mode is for secrets
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
