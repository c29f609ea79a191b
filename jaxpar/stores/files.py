"""The other files of a run in a store, each uploaded whole: config, manifest, records, profiles."""

import errno
from collections.abc import Iterator
from pathlib import Path

from jaxpar.runtime.messages import warn
from jaxpar.stores.objects import Found, Missing, Objects, can_be_named
from jaxpar.stores.parts import GROWING
from jaxpar.stores.sessions import NAME as SESSION
from jaxpar.stores.steps import COMPLETE, SHARDS, STEPS

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
