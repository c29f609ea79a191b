"""Checks of a folder that a program is to make (`atomic.new_folder`)."""

import shutil
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import check_path
from jaxpar.runtime.files.outputs import require_place
from jaxpar.runtime.units import size


def refuse_used(argument: str, path: Path) -> None:
    """Raises:   ConfigError for `argument` when a path is in use, or cannot be created."""
    check_path(argument, str(path), "use a new folder")
    place = path.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        rule = "already exists, and is not empty"
        raise ConfigError(argument, str(path), rule, "use a new folder")
    if place == Path.cwd().resolve() or place.is_mount():
        what = "a mount point" if place.is_mount() else "the current directory"
        rule = f"is {what}, which cannot be replaced"
        raise ConfigError(argument, str(path), rule, f"use a new folder in it: {path / 'new'}")
    require_place(argument, path)


def require_space(argument: str, path: Path, num_bytes: int) -> None:
    """Check that the disk has room for the output.

    Weights are written through memory maps, where a full disk would end the process with a signal.

    Raises:   ConfigError for `argument` when it does not.
    """
    at = next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(at).free
    if free < num_bytes:
        rule = f"needs {size(num_bytes)} of disk space, but {size(free)} are free"
        raise ConfigError(argument, str(path), rule, "free space, or use another folder")
