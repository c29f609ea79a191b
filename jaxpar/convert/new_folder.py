"""The folder that a conversion writes: it appears when it is complete, or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.convert.hf.folder import CARRIED_FILES
from jaxpar.runtime.progress import size

#: Where a run keeps what came with its weights.
CARRIED = "hf"


def refuse_used(argument: str, path: Path) -> None:
    """Raises:   ConfigError, naming the argument, when a path is in use, or cannot be made."""
    place = path.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        rule = "is there already, and is not empty"
        raise ConfigError(argument, str(path), rule, "name a new folder")
    if place == Path.cwd().resolve() or place.is_mount():
        what = "a disk's own folder" if place.is_mount() else "the folder that this runs in"
        rule = f"is {what}, and cannot be replaced by another"
        raise ConfigError(argument, str(path), rule, f"name a new folder in it: {path / 'new'}")
    require_place(argument, path)


def require_place(argument: str, path: Path) -> None:
    """Raises:   ConfigError, naming the argument, unless something can be made at a path."""
    above = next(parent for parent in path.resolve().parents if parent.exists())
    if not above.is_dir():
        rule = f"cannot be created: {above} is a file"
        raise ConfigError(argument, str(path), rule, "name a folder you may write")
    if not os.access(above, os.W_OK | os.X_OK):
        rule = f"cannot be created: {above} may not be written"
        raise ConfigError(argument, str(path), rule, "name a folder you may write")


def require_space(argument: str, path: Path, num_bytes: int) -> None:
    """Raises:   ConfigError, naming the argument, when the disk has no room for what comes there.

    Weights are written through memory maps, where a full disk would end the process with a signal.
    """
    at = next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(at).free
    if free < num_bytes:
        rule = f"needs {size(num_bytes)} of disk, and {size(free)} are free"
        raise ConfigError(argument, str(path), rule, "make room, or name another folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it at the end; removed if anything fails.

    Where `folder` is a link, what it points to is meant.
    """
    folder = folder.resolve()
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=parent))
    try:
        temporary.chmod(0o755)  # mkdtemp's own mode is for secrets
        yield temporary
        if folder.exists():
            folder.rmdir()  # empty: it was looked at before
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_carried(folder: Path, to: Path) -> None:
    """Copy what comes with weights: config, tokenizer, generation settings."""
    to.mkdir(exist_ok=True)
    for name in CARRIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
