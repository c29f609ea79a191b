"""Finds out which processes of a run see the same folder, whatever file systems they are on."""

import contextlib
import os
import secrets
import time
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.runtime.processes import peers

#: The file by which processes recognize a folder: the first to come makes it.
NAME = ".same_folder"

#: Seconds in which a file that one process has made must have content for the others.
CONTENT_SECONDS = 30.0


def sharing(field: str, folder: Path, seconds: float) -> list[int]:
    """Return for each process the first one that sees the same folder at this path.

    The path may differ between processes. A folder that was missing is missing again afterwards.

    Args:     field: the setting that holds the path. seconds: to wait for other processes.
    Raises:   ConfigError if the folder cannot be written; in the other processes, PeerFailed.
    """
    if peers.world_size() == 1:
        return [0]
    new = not folder.exists()
    mark = peers.all_or_none(f"{field} of each host", seconds, lambda: _mark(field, folder))
    marks = peers.exchange(f"{field} of each process", mark, seconds)
    with contextlib.suppress(OSError):
        (folder / NAME).unlink()
    if new:
        with contextlib.suppress(OSError):  # not if it has content, or another process was faster
            folder.rmdir()
    return [marks.index(one) for one in marks]


def _mark(field: str, folder: Path) -> str:
    """Return what the first process of all that see the folder has written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(folder / NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(16)}\n")
        until = time.monotonic() + CONTENT_SECONDS
        while not (text := (folder / NAME).read_text()).endswith("\n"):
            if time.monotonic() > until:
                (folder / NAME).unlink()
                raise TimeoutError(None, f"another process left {NAME} empty; it was deleted")
            time.sleep(0.05)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError(field, str(folder), rule, "use another folder") from error
    return text.strip()
