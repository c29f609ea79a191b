"""The files and folders that a command writes: checked before it begins, and JSON written."""

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import absolute, check_path
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import atomic
from jaxpar.runtime.units import size


def check_file(
    option: str,
    path: str | None,
    example: str = "runs/card.json",
    *,
    endings: Sequence[str] = (),
    new: bool = False,
    in_existing_folder: bool = False,
) -> None:
    """Check that an output file can be written, before the work.

    Args:     path: the value of the option; None if it is not set. example: of a path. endings: of
              its name, if not every one is valid. new: whether nothing may be there yet.
              in_existing_folder: whether the command leaves the making of folders to the user.
    Raises:   ConfigError that names the option.
    """
    if path is None:
        return
    use = f"use {option}" if option.startswith("-") else "use"
    _check_text(option, path, f"{use} {example}")
    place = Path(path)
    is_folder = place.is_dir() or place.name in ("", "..")
    below = shlex.quote(str(place / Path(example).name))
    if endings and place.suffix not in endings:
        better = below if is_folder else shlex.quote(f"{place}{endings[0]}")
        rule = f"must end in {' or '.join(endings)}"
        raise ConfigError(option, path, rule, f"{use} {better}")
    if new and place.exists():
        fix = "choose another name or remove the file"
        raise ConfigError(option, path, "already exists", fix)
    if is_folder:
        raise ConfigError(option, path, "is a folder, not a file", f"{use} {below}")
    if place.exists() and not place.is_file():
        return  # a device or a pipe
    if in_existing_folder and not place.parent.exists():
        rule = f"needs the folder {place.parent}, which does not exist"
        raise ConfigError(option, path, rule, "create the folder or choose another")
    require_place(option, place)


def check_folder(option: str, path: str | None) -> None:
    """Check that an output folder can be written, before the work.

    Raises:   ConfigError that names the option.
    """
    if path is None:
        return
    _check_text(option, path, f"use {option} runs/folder")
    if Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(option, path, "is a file, not a folder", f"use {option} {path}-folder")
    require_place(option, Path(path), inside=True)


def require_place(argument: str, path: Path, inside: bool = False) -> None:
    """Check that a file or folder can be created at a path, or inside it.

    Raises:   ConfigError for `argument` if it cannot.
    """
    place = absolute(path).resolve()
    places = (place, *place.parents) if inside else place.parents
    above = next(folder for folder in places if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        rule = f"cannot be created: {above} is {'not writable' if above.is_dir() else 'a file'}"
        raise ConfigError(argument, str(path), rule, "use a folder that you can write to")


def _check_text(option: str, path: str, fix: str) -> None:
    if not path:
        raise ConfigError(option, path, "is empty", fix)
    check_path(option, path, fix)


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


def write_json(option: str, path: str | Path, value: Any) -> None:
    """Write a value atomically, and create its parent folders.

    Args:     option: the option that names the file, for the error.
    Raises:   RunError if the file cannot be written.
    """
    write(option, Path(path), (json.dumps(value, indent=2) + "\n").encode())


def write(option: str, path: Path, content: bytes) -> None:
    """As `write_json`, for any content."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        kept = ". The existing file is unchanged" if path.is_file() else ""
        why = f"cannot be written: {error.strerror or error}{kept}"
        raise exit_codes.RunError(f"{option} = {str(path)!r}: {why}") from error
