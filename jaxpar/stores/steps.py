"""Checkpoints in a store: each is complete or absent.

The files of a checkpoint are objects below checkpoints/STEP/. The object complete/STEP lists them
with their sizes and SHA-256, and is written last: without it there is no checkpoint. It is the
first object to be deleted.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from jaxpar.runtime.files import atomic
from jaxpar.runtime.terminal import warn
from jaxpar.stores.objects import (
    Altered,
    Conflict,
    Content,
    Missing,
    Objects,
    OddName,
    StoreError,
    can_be_named,
    list_of_files,
    read_list,
)

#: Where the files of a checkpoint are, here and in a store, and where its list of files is.
STEPS, COMPLETE = "checkpoints", "complete"

#: Where the lists of shards of a checkpoint are that is not complete yet (`shards.py`).
SHARDS = "shards"

#: The file that a checkpoint has once it is finished, `checkpoint.integrity.FILES`. It differs
#: between any two.
MARK = "jaxpar_files.json"

#: The name of a step.
_STEP = re.compile("0|[1-9][0-9]{0,17}")

#: Files of a checkpoint that are sent or received at the same time.
FILES_AT_ONCE = 8


def complete_steps(objects: Objects) -> list[int]:
    """Return the complete checkpoints of a run, ascending. Raises:   StoreError."""
    names = (found.name.removeprefix(f"{COMPLETE}/") for found in objects.names(f"{COMPLETE}/"))
    return sorted(step for step in map(step_of, names) if step is not None)


def step_of(name: str) -> int | None:
    """Return the step that a name in checkpoints/ or complete/ is; None for others' names."""
    return int(name) if _STEP.fullmatch(name) else None


def listed(objects: Objects, step: int) -> dict[str, Content]:
    """Return the files of a complete checkpoint.

    Raises:   Missing if it is not complete; Altered if the list is damaged; StoreError.
    """
    return read_list(objects, f"{COMPLETE}/{step}")


def finished_steps(folder: Path) -> dict[int, tuple[int, int]]:
    """Return the finished checkpoints of a folder, with what tells two saves of a step apart."""
    found = {}
    for file in sorted((folder / STEPS).glob(f"*/{MARK}")):
        if (step := step_of(file.parent.name)) is not None:
            with contextlib.suppress(FileNotFoundError):
                about = file.stat()
                found[step] = about.st_mtime_ns, about.st_ino
    return found


def upload_step(
    objects: Objects,
    folder: Path,
    step: int,
    still_ours: Callable[[], None],
    there: Mapping[str, Content] = MappingProxyType({}),
) -> int:
    """Upload a finished checkpoint, and return its size in bytes.

    Objects of an earlier upload of the step, which may be another one, are deleted.

    Args:     folder: of the run. still_ours: called before the store is changed, and before the
              step is declared complete; raises if another run may be writing. there: files of the
              checkpoint that are in the store already, and not in the folder.
    Raises:   FileNotFoundError if the run deletes the step meanwhile; StoreError; as `still_ours`.
    """
    place = folder / STEPS / str(step)
    names = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
    if not names:
        raise FileNotFoundError(str(place))
    complete = f"{COMPLETE}/{step}"
    still_ours()
    objects.delete([complete])
    contents = {**there, **upload_files(objects, place, step, names)}
    _require_sizes(objects, step, contents)
    content = list_of_files(contents, step=step)
    still_ours()
    try:
        # A process whose lease ended after the check, while this was sent again, changes nothing
        # that the next holder has completed.
        objects.write_if(complete, content, None)
    except Conflict as error:  # also of a request that won, and whose answer was lost
        if objects.read(complete)[0] != content:
            still_ours()
            raise StoreError(f"{objects.address}/{complete} was written by another run") from error
    return sum(one.bytes for one in contents.values())


def upload_files(
    objects: Objects, place: Path, step: int, names: Sequence[str]
) -> dict[str, Content]:
    """Upload files of a checkpoint, several at a time, and return what each contains.

    Args:     place: the folder of the checkpoint. names: relative to it.
    Raises:   FileNotFoundError; StoreError.
    """
    beside = max(min(len(names), FILES_AT_ONCE), 1)

    def send(name: str) -> Content:
        return objects.upload(f"{STEPS}/{step}/{name}", place / name, beside)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="upload") as pool:
        return dict(zip(names, pool.map(send, names), strict=True))


def _require_sizes(objects: Objects, step: int, contents: Mapping[str, Content]) -> None:
    """Compare the objects of a step with what was sent, and delete others of an earlier upload.

    Raises:   StoreError that names an object that is missing or has another size.
    """
    below = f"{STEPS}/{step}/"
    try:
        there = {found.name.removeprefix(below): found.size for found in objects.names(below)}
    except OddName as error:  # then each is looked at, and others stay
        warn(str(error))
        there = {}
        for name in contents:
            with contextlib.suppress(Missing):
                there[name], _ = objects.about(f"{below}{name}")
    for name, content in contents.items():
        if name not in there:
            raise StoreError(f"{objects.address}/{below}{name} was sent, and is not there")
        if there[name] != content.bytes:
            sizes = f"{there[name]:,} bytes, not the {content.bytes:,} that were sent"
            raise StoreError(f"{objects.address}/{below}{name} has {sizes}")
    objects.delete([f"{below}{name}" for name in sorted(there.keys() - contents.keys())])


def delete_step(objects: Objects, step: int) -> None:
    """Delete a checkpoint, whether it is complete or not. Raises:   StoreError."""
    objects.delete([f"{COMPLETE}/{step}"])
    for below in (SHARDS, STEPS):
        try:
            objects.delete([found.name for found in objects.names(f"{below}/{step}/")])
        except OddName as error:  # what is left is no checkpoint
            warn(str(error))


def incomplete_steps(objects: Objects, complete: set[int]) -> list[int]:
    """Return the steps that have objects, but are not complete. Raises:   OddName; StoreError."""
    below = (one for folder in (SHARDS, STEPS) for one in objects.level(f"{folder}/")[0])
    found = (step_of(name.rpartition("/")[2]) for name in below)
    return sorted({step for step in found if step is not None} - complete)


def download_step(objects: Objects, folder: Path, step: int) -> int:
    """Download a complete checkpoint to a run's folder, and return its size in bytes.

    The checkpoint appears in the folder when all its files are there, and have the size and the
    SHA-256 that were recorded.

    Raises:   Missing; Altered that names every damaged object; StoreError.
    """
    files = listed(objects, step)
    temporary = folder / ".downloading" / str(step)
    shutil.rmtree(temporary, ignore_errors=True)

    def receive(name: str) -> str:
        try:
            objects.download(f"{STEPS}/{step}/{name}", temporary / name, files[name])
        except Missing:
            return f"{STEPS}/{step}/{name} is missing"
        except Altered as error:
            return str(error)
        return ""

    try:
        if unsafe := [name for name in files if not can_be_named(name)]:
            raise Altered(f"{COMPLETE}/{step} lists {unsafe[0]}")
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="download") as pool:
            damage = [text for text in pool.map(receive, files) if text]
        if damage:
            raise Altered("; ".join(damage[:8]))
        place = folder / STEPS / str(step)
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic.publish(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(content.bytes for content in files.values())


def is_same(objects: Objects, folder: Path, step: int) -> bool:
    """Whether the checkpoint of a folder is that of the store, by its list of files.

    Raises:   Missing; Altered; StoreError.
    """
    files, mark = listed(objects, step), folder / STEPS / str(step) / MARK
    if MARK not in files or not mark.is_file():
        return True
    content = mark.read_bytes()
    return Content(len(content), hashlib.sha256(content).hexdigest()) == files[MARK]
