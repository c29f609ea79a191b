"""Checkpoints of hosts that share no folder: each process uploads its shards, process 0 completes.

A process saves its shards to a folder of its own. Its files of arrays, whose names no other file
has, become objects below checkpoints/STEP/. The object shards/STEP/SAVE/PROCESS lists them, and
holds the small files: it is written last. Once every process has written one, process 0 joins the
small files to the index of the whole checkpoint, uploads that, and writes complete/STEP. What is
then in the store is a checkpoint as any other.

SAVE names the session of the run and what was saved. No other save has it, so shards of two saves
are never joined, even if a process of an earlier attempt still uploads.

An attempt that was killed may have saved a step in all processes, but not uploaded it. The hosts
of the next attempt upload it before they start (`finish`), also if their ranks are others, as long
as every shard is on one of them.
"""

import base64
import contextlib
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxpar.config.json_reader import read_json
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.terminal import warn
from jaxpar.stores import steps
from jaxpar.stores.files import last_session, sessions_of
from jaxpar.stores.lease import Lease
from jaxpar.stores.objects import Altered, Content, Objects, StoreError, content_of

#: Lists of shards that process 0 reads at the same time.
LISTS_AT_ONCE = 32

#: Marks the form of a list of shards.
FORMAT = 1


@dataclass(frozen=True)
class ShardLayout:
    """What the files of a process's shards mean, which `checkpoint` knows."""

    identity: Callable[[Path], str]
    """Returns what tells two saves apart, given the folder of a step: the same in each process."""
    is_array: Callable[[str], bool]
    """Whether a file, by its name, holds arrays. No two processes have such a name."""
    join: Callable[[Sequence[Mapping[str, bytes]], Mapping[str, Content], Path], None]
    """Writes the small files of the whole checkpoint to a folder. Args: the small files of each
    process; the files of arrays. Raises:   ValueError if they do not fit together."""


class SentShards(NamedTuple):
    """The shards of one process in a store."""

    arrays: dict[str, Content]
    small: dict[str, bytes]


class ProcessShards:
    """Uploads the shards of this process."""

    def __init__(
        self,
        objects: Objects,
        folder: Path,
        process: tuple[int, int],
        session: str,
        layout: ShardLayout,
    ):
        """
        Args:     folder: has this process's shards of each step in checkpoints/STEP. process: its
                  rank, and the number of processes. session: of the run, the same in all.
        """
        self.folder, self._objects, self._layout = folder, objects, layout
        (self._rank, self._count), self._session = process, session
        self._sent: dict[str, int] = {}

    def send(self, step: int) -> int:
        """Upload the shards of a step, unless this has been done. Returns:  their bytes.

        Raises:   FileNotFoundError if the run deletes the step meanwhile; StoreError.
        """
        save = self.save_of(step)
        if save in self._sent:
            return self._sent[save]
        place = self.folder / steps.STEPS / str(step)
        names = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
        arrays = [name for name in names if self._layout.is_array(name)]
        small = {name: (place / name).read_bytes() for name in names if name not in arrays}
        contents = steps.upload_files(self._objects, place, step, arrays)
        self._objects.write(f"{save}/{self._rank}", _written(SentShards(contents, small)))
        self._sent[save] = sum(content.bytes for content in contents.values())
        return self._sent[save]

    def save_of(self, step: int) -> str:
        """As `save_name`, of the step in the folder.

        Raises:   FileNotFoundError if it is not there.
        """
        identity = self._layout.identity(self.folder / steps.STEPS / str(step))
        return save_name(self._session, self._count, identity, step)

    def missing(self, step: int) -> list[int]:
        """Return the processes whose shards of the step in the folder are not in the store yet.

        Raises:   FileNotFoundError if the step is not there; StoreError.
        """
        save = self.save_of(step)
        there = {one.name.rpartition("/")[2] for one in self._objects.names(f"{save}/")}
        return [rank for rank in range(self._count) if str(rank) not in there]

    def complete(self, step: int, still_ours: Callable[[], None]) -> int | None:
        """In process 0: upload the shards of a step, and complete it once all are there.

        Args:     still_ours: as in `steps.upload_step`.
        Returns:  its bytes; None while shards of other processes are missing.
        Raises:   as `send` and `complete_step`.
        """
        self.send(step)
        if self.missing(step):
            return None
        save, scratch = self.save_of(step), self.folder / ".joining"
        return complete_step(
            self._objects, self._layout, save, step, self._count, scratch, still_ours
        )


def save_name(session: str, count: int, identity: str, step: int) -> str:
    """Return the name below which the shards of a save are listed.

    Args:     session: of the run. count: of its processes. identity: as `ShardLayout.identity`.
    """
    mark = hashlib.sha256(f"{session} {count} {identity}".encode()).hexdigest()
    return f"{steps.SHARDS}/{step}/{mark[:24]}"


def complete_step(
    objects: Objects,
    layout: ShardLayout,
    save: str,
    step: int,
    count: int,
    scratch: Path,
    still_ours: Callable[[], None],
) -> int:
    """Complete a checkpoint of which all shards are in the store. Returns:  its bytes.

    Args:     save: from `save_name`. count: of the processes. scratch: a folder for the small
              files, which does not exist afterwards. still_ours: as in `steps.upload_step`.
    Raises:   Altered if shards are damaged; Missing if they are gone; StoreError; as `still_ours`.
    """
    with ThreadPoolExecutor(LISTS_AT_ONCE, thread_name_prefix="shards") as pool:
        names = [f"{save}/{rank}" for rank in range(count)]
        shards = list(pool.map(functools.partial(_read, objects), names))
    arrays = {name: content for shard in shards for name, content in shard.arrays.items()}
    _check_arrays(objects, step, arrays)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        place = scratch / steps.STEPS / str(step)
        try:
            layout.join([shard.small for shard in shards], arrays, place)
        except ValueError as error:
            raise Altered(f"{save}: {error}") from error
        total = steps.upload_step(objects, scratch, step, still_ours, arrays)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(StoreError):  # it is complete, and they are in nobody's way
        objects.delete([one.name for one in objects.names(f"{steps.SHARDS}/{step}/")])
    return total


def _check_arrays(objects: Objects, step: int, arrays: Mapping[str, Content]) -> None:
    """Raises:   Altered that names a file of arrays that is missing or has another size."""
    below = f"{steps.STEPS}/{step}/"
    there = {one.name.removeprefix(below): one.size for one in objects.names(below)}
    for name, content in arrays.items():
        if there.get(name) != content.bytes:
            size = there.get(name, 0)
            raise Altered(f"{below}{name} has {size:,} bytes, not {content.bytes:,}")


def _written(shard: SentShards) -> bytes:
    small = {name: base64.b64encode(content).decode() for name, content in shard.small.items()}
    arrays = {name: content._asdict() for name, content in shard.arrays.items()}
    about = json.dumps({"format": FORMAT, "arrays": arrays, "small": small}, sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()
    return json.dumps({"sha256": digest, "about": about}).encode()


def _read(objects: Objects, name: str) -> SentShards:
    """Raises:   Altered if the object is damaged; Missing; StoreError."""
    content = objects.read(name)[0]
    try:
        sealed = read_json(content, what="it")
        about = read_json(sealed["about"].encode(), what="it")
        if sealed["sha256"] != hashlib.sha256(sealed["about"].encode()).hexdigest():
            raise ValueError("has different content")
        if about["format"] != FORMAT:
            raise ValueError("is no list of shards")
        small = {str(key): base64.b64decode(value) for key, value in about["small"].items()}
        return SentShards(dict(content_of(about["arrays"])), small)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Altered(f"{name} is no list of shards: {error}") from error


_FOLDER_NAME = re.compile("([0-9]{1,9})-of-([0-9]{1,9})")


class SavedShards(NamedTuple):
    """Shards of one process of an earlier attempt, in a folder of a host."""

    step: int
    num_processes: int
    identity: str
    rank: int


def folder_name(rank: int, count: int) -> str:
    """Return the name of the folder of shards of one of the processes, in that of the run."""
    return f"{steps.SHARDS}/{rank}-of-{count}"


def finish(
    objects: Objects,
    folder: Path | None,
    lease: Lease | None,
    layout: ShardLayout,
    seconds: float,
) -> None:
    """Upload and complete the newest step of the last attempt, if it is newer than the store's.

    All processes call this together.

    Args:     folder: of the run, in the first process of those that share it; None in the others.
              lease: in process 0. seconds: to wait for other processes.
    Raises:   StoreError; OSError; in the other processes, PeerFailed.
    """

    def known() -> str:
        if lease is None:
            return ""
        newest = max(steps.complete_steps(objects), default=-1)
        return f"{lease.session} {newest} {last_session(objects)}"

    own = peers.all_or_none("newest step of the store", seconds, known)
    told = peers.exchange("session that finishes", own, seconds)[0].split()
    session, newest, before = told[0], int(told[1]), told[2]
    mine = _saved(folder, layout) if folder and before in sessions_of(folder) else []
    lines = "\n".join(" ".join(map(str, one)) for one in mine if one.step > newest)
    chosen = _chosen(peers.reports("shards of an earlier attempt", lines or None, seconds))
    if not chosen:
        return
    step, count, identity, _ = next(iter(chosen))
    log(f"uploading  step {step} of an earlier attempt, from {len(set(chosen.values()))} hosts")

    def send() -> None:
        for one, process in chosen.items():
            if process == peers.rank() and folder is not None:
                place = folder / folder_name(one.rank, count)
                ProcessShards(objects, place, (one.rank, count), session, layout).send(step)

    peers.all_or_none("shards of an earlier attempt are sent", seconds, send)

    def join() -> None:
        if lease is None or folder is None:
            return
        save = save_name(session, count, identity, step)
        try:
            complete_step(objects, layout, save, step, count, folder / ".joining", lease.check)
        except Altered as error:
            warn(f"step {step} of an earlier attempt cannot be completed: {error}")
            steps.delete_step(objects, step)

    peers.all_or_none("earlier attempt is complete", seconds, join)


def _saved(folder: Path, layout: ShardLayout) -> list[SavedShards]:
    """Return the shards in the folder of a run."""
    found = []
    for place in sorted((folder / steps.SHARDS).glob("*")):
        if (name := _FOLDER_NAME.fullmatch(place.name)) is None:
            continue
        for step in steps.finished_steps(place):
            try:
                identity = layout.identity(place / steps.STEPS / str(step))
            except (OSError, ValueError):  # damaged: it is not uploaded
                continue
            found.append(SavedShards(step, int(name[2]), identity, int(name[1])))
    return found


def _chosen(texts: dict[int, str]) -> dict[SavedShards, int]:
    """Return the shards of the newest step of which all are there, each with a process that has it.

    Args:     texts: the lines of `finish`, by process.
    """
    saves: dict[tuple[int, int, str], dict[int, int]] = {}
    for process, text in sorted(texts.items(), reverse=True):
        for of_step, of, name, rank in map(str.split, text.splitlines()):
            saves.setdefault((int(of_step), int(of), name), {})[int(rank)] = process
    whole = [save for save, ranks in saves.items() if set(ranks) == set(range(save[1]))]
    if not whole:
        return {}
    step, count, identity = max(whole)
    ranks = saves[step, count, identity]
    return {SavedShards(step, count, identity, rank): ranks[rank] for rank in range(count)}
