"""Finds the newest copy of the state of which every piece is left, and loads it onto any mesh.

Process 0 asks all hosts, decides, and tells the others.
"""

import collections
import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxpar.checkpoint.loading import agree, restore_from, verify
from jaxpar.checkpoint.saved import Saved, saved_of, starting_step
from jaxpar.config import Config
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.data.skips import SkippedBatches, read_skipped
from jaxpar.memory_checkpoint.client import HostLost, PieceClient
from jaxpar.memory_checkpoint.piece_file import (
    ArrayPiece,
    ArrayType,
    ByteSource,
    DamagedPieces,
    LocalBytes,
    PieceIndex,
    RemoteBytes,
    StoredPieces,
)
from jaxpar.memory_checkpoint.places import Group, MemoryPlace, complete_files, read_name
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.grid import Box, boxes_of, covers, extent, intersection, volume, within
from jaxpar.step.state import TrainState

#: Hosts that are asked at a time.
HOSTS_AT_A_TIME = 32


@dataclass(frozen=True)
class FoundCopy:
    """A complete copy of the state in the memory of hosts."""

    group: Group
    saved: Saved
    files: dict[str, tuple[int, ...]]
    """The hosts that have a file, by its name."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of each array, by its name."""


def find(cfg: Config, place: MemoryPlace | None) -> list[FoundCopy]:
    """Return the complete copies that are newer than the checkpoints, the newest first.

    All processes call this and get the same.

    Args:     place: None without copies.
    Raises:   as `starting_step`; in the other processes, PeerFailed for an error of process 0.
    """
    if place is None or cfg.checkpoint.resume == "never":
        return []
    seconds = cfg.cluster.slow_seconds or 1e6

    def look() -> str:
        return json.dumps([dataclasses.asdict(one) for one in _look(cfg, place)])

    return [_as_found(one) for one in json.loads(peers.of_first("copies in memory", look, seconds))]


def _as_found(said: dict) -> FoundCopy:
    files, shapes = ({k: tuple(v) for k, v in said[name].items()} for name in ("files", "shapes"))
    return FoundCopy(Group(*said["group"]), Saved(**said["saved"]), files, shapes)


class Hosts:
    """The files of all hosts that answer. A context manager."""

    def __init__(self, place: MemoryPlace):
        self._place = place
        self._clients: dict[tuple[int, int], PieceClient] = {}
        self._open = ExitStack()

    def files(self) -> dict[int, dict[str, int]]:
        """Return the bytes of each file, by host and name. A host that is lost has none."""
        with ThreadPoolExecutor(HOSTS_AT_A_TIME) as pool:
            listed = pool.map(self._files_of, range(self._place.num_hosts))
            return dict(enumerate(listed))

    def _files_of(self, host: int) -> dict[str, int]:
        if host == self._place.host:
            there = complete_files(self._place.folder)
            return {str(file): paths[0].stat().st_size for file, paths in there.items()}
        try:
            return self._client(host).files()
        except HostLost as error:
            warn(f"copies in memory: host {host} does not answer: {error}")
            return {}

    def _client(self, host: int) -> PieceClient:
        """Return the calling thread's connection to a host: threads read at the same time."""
        key = host, threading.get_ident()
        if key not in self._clients:
            client = self._place.connected(self._place.peers[host])
            self._clients[key] = self._open.enter_context(client)
        return self._clients[key]

    def open(self, name: str, hosts: Iterable[int]) -> Iterator[StoredPieces]:
        """Yield a file of the first host that has it intact, then of the next, and so on.

        A warning names each that is damaged. This host comes first.
        """
        for host in sorted(hosts, key=lambda host: host != self._place.host):
            try:
                yield from (StoredPieces(source) for source in self._sources(name, host))
            except (DamagedPieces, OSError) as error:
                warn(f"copies in memory: {error}; this file is not used")

    def _sources(self, name: str, host: int) -> Iterator[ByteSource]:
        file = read_name(name)
        if host == self._place.host and file is not None:
            for path in complete_files(self._place.folder).get(file, []):
                yield LocalBytes(path)
            return
        size = self._client(host).files().get(name, 0)
        yield RemoteBytes(functools.partial(self._client, host), name, size)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _look(cfg: Config, place: MemoryPlace) -> list[FoundCopy]:
    """In process 0: return what `find` returns."""
    found, on_disk = [], starting_step(cfg)
    with Hosts(place) as hosts:
        by_group: dict[Group, dict[str, list[int]]] = {}
        for host, files in hosts.files().items():
            for name in files:
                if (file := read_name(name)) is not None:
                    by_group.setdefault(file.group, {}).setdefault(name, []).append(host)
        for group, names in sorted(by_group.items(), reverse=True):
            if on_disk is not None and group.step <= on_disk:
                continue
            opened = {
                name: next(_described(hosts.open(name, at)), None) for name, at in names.items()
            }
            whole = {name: one for name, one in opened.items() if one is not None}
            indices = [index for index, _ in whole.values()]
            saved = next((saved for _, saved in whole.values()), None)
            if saved is None:
                continue  # a warning names each file that is not intact
            if why := _unfit(cfg, group, indices, saved):
                warn(f"the copy of step {group.step} in memory is not used: {why}")
                continue
            shapes = {array.name: tuple(array.shape) for array in indices[0].arrays}
            hosts_of = {name: tuple(names[name]) for name in whole}
            found.append(FoundCopy(group, saved, hosts_of, shapes))
    return found


def _described(files: Iterable[StoredPieces]) -> Iterator[tuple[PieceIndex, Saved]]:
    """Yield the index and the metadata of each file whose metadata can be read."""
    for file in files:
        try:
            yield file.index, saved_of(file.index.about, f"the metadata in {file.where}")
        except UnreadableJson as error:
            warn(f"copies in memory: {error}; this file is not used")


def _unfit(cfg: Config, group: Group, indices: list[PieceIndex], saved: Saved) -> str:
    """Return why a run cannot resume from a copy; empty if it can."""
    if any(index.arrays != indices[0].arrays for index in indices):
        return "its files are of different arrays"
    if missing := missing_parts(indices):
        return f"{len(missing)} of {len(indices[0].arrays)} arrays are not complete: {missing[0]}"
    known = read_skipped(Path(cfg.run.dir))
    then = SkippedBatches().and_also(saved.skipped_batches, saved.rewinds)
    if known != then:
        return f"it skips {then}, and the run {known}"
    return "" if saved.step == group.step else f"it says that it is of step {saved.step}"


def missing_parts(indices: Iterable[PieceIndex]) -> list[str]:
    """Return the names of the arrays of which a part is in none of the files of one copy."""
    boxes: dict[int, dict[Box, None]] = {}
    arrays: tuple[ArrayType, ...] = ()
    for index in indices:
        arrays = index.arrays
        for piece in index.pieces:
            boxes.setdefault(piece.array, {})[piece.box] = None
    # The pieces of one copy are shards of one mesh: equal, or without a common element.
    whole = [tuple(slice(0, size) for size in array.shape) for array in arrays]
    return [
        array.name
        for number, (array, box) in enumerate(zip(arrays, whole, strict=True))
        if not covers(boxes.get(number, {}), box)
    ]


#: Arrays that are assembled at a time.
AT_A_TIME = 8


def restore(cfg: Config, mesh: Mesh, place: MemoryPlace, found: FoundCopy) -> TrainState:
    """Restore the run's state onto this mesh, from a copy that any mesh has made.

    Returns:  as `checkpoint.loading.restore`.
    Raises:   Damaged, in all processes, when a piece is damaged or lost wherever it was.
    """
    with Hosts(place) as hosts:
        load = lambda target, _: _load(target, found, place, hosts)  # noqa: E731
        return restore_from(cfg, mesh, found.saved, load, found.shapes.__getitem__)


def _load(target: Any, found: FoundCopy, place: MemoryPlace, hosts: Hosts) -> Any:
    """Load and verify the arrays that `target` describes. Raises:   Damaged."""
    where = f"the copy of step {found.group.step} in memory"
    loaded, damage = None, []
    try:
        loaded = _assembled(target, CopiedPieces(found, place, hosts))
    except LostPieces as error:
        damage = [str(error)]
    agree(where, damage)
    verify(where, found.saved, loaded)
    return loaded


def _assembled(target: Any, pieces: "CopiedPieces") -> Any:
    """Return the arrays that `target` describes. Raises:   LostPieces."""
    arrays, structure = [], jax.tree.structure(target)
    left = iter(named_leaves(target).items())
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="restore") as pool:
        waiting: collections.deque[tuple[Any, Future[dict[Box, np.ndarray]]]] = collections.deque()

        def begin() -> None:
            for name, x in itertools.islice(left, 1):
                waiting.append((x, pool.submit(pieces.parts, name, x)))

        for _ in range(AT_A_TIME):
            begin()
        while waiting:
            x, parts = waiting.popleft()
            arrays.append(_on_devices(x, parts.result()))
            begin()
    return jax.tree.unflatten(structure, arrays)


def _on_devices(x: Any, parts: dict[Box, np.ndarray]) -> jax.Array:
    """Return the array that x describes, of its parts on the host."""
    shards = []
    for box, devices in boxes_of(x.shape, x.sharding).items():
        for device in devices:
            to = SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind)
            shards.append(jax.device_put(parts[box], to, may_alias=False))
    array = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
    return jax.block_until_ready(array)


class LostPieces(Exception):
    """A part of an array is on no host any more."""


class _FileLost(Exception):
    """A file is damaged, or its host is lost."""

    def __init__(self, file: str, opened: StoredPieces):
        super().__init__(file)
        self.file, self.opened = file, opened


class CopiedPieces:
    """The pieces of a copy, from this host's files first. Threads may share it."""

    def __init__(self, found: FoundCopy, place: MemoryPlace, hosts: Hosts):
        self._lock = threading.Lock()
        self._sources = {name: hosts.open(name, at) for name, at in found.files.items()}
        self._opened: dict[str, StoredPieces] = {}
        self._by_array: dict[str, dict[Box, list[tuple[str, ArrayPiece]]]] = {}
        self._closed = sorted(found.files, key=lambda name: place.host not in found.files[name])

    def parts(self, name: str, x: Any) -> dict[Box, np.ndarray]:
        """Return the parts of an array that devices of this process hold.

        Args:     x: the array, abstract, with a sharding.
        Raises:   LostPieces.
        """
        boxes = list(boxes_of(x.shape, x.sharding))
        while True:
            chosen = self._covering(name, boxes)
            try:
                return {box: self._part(chosen, box, np.dtype(x.dtype)) for box in boxes}
            except _FileLost as error:
                with self._lock:
                    if self._opened[error.file] is error.opened:  # no other thread has reopened it
                        self._reopen(error.file)

    def _covering(self, name: str, boxes: list[Box]) -> list[tuple[str, ArrayPiece]]:
        """Return pieces, with their files, that cover boxes of an array. Raises:   LostPieces."""
        with self._lock:
            while True:
                rank = len(boxes[0])
                there = {b: at for b, at in self._by_array.get(name, {}).items() if len(b) == rank}
                if all(covers(there, box) for box in boxes):
                    return [files[0] for files in there.values()]
                if not self._closed:
                    raise LostPieces(f"a part of {name} is on no host")
                self._reopen(self._closed.pop(0))

    def _reopen(self, file: str) -> None:
        """Use a file of the next host that has it intact; none of its pieces without one."""
        for there in self._by_array.values():
            for box in list(there):
                there[box] = [one for one in there[box] if one[0] != file]
                if not there[box]:
                    del there[box]
        opened = next(self._sources[file], None)
        if opened is None:
            return
        self._opened[file] = opened
        for piece in opened.index.pieces:
            there = self._by_array.setdefault(opened.index.arrays[piece.array].name, {})
            there.setdefault(piece.box, []).append((file, piece))

    def _part(self, chosen: list[tuple[str, ArrayPiece]], box: Box, dtype: np.dtype) -> np.ndarray:
        """Return a part of an array. Not to be written to. Raises:   _FileLost."""
        whole = np.empty(0)
        for file, piece in chosen:
            common = intersection(piece.box, box)
            if not volume(common):
                continue
            rows = self._rows(file, piece, dtype.itemsize, common).view(dtype)
            if piece.box == box:
                return rows.reshape(piece.shape)
            if not whole.size:
                whole = np.empty(extent(box), dtype)
            first = (common[0], *piece.box[1:])
            values = rows.reshape(extent(first))
            whole[within(common, box)] = values[within(common, first)]
        return whole

    def _rows(self, file: str, piece: ArrayPiece, size: int, box: Box) -> np.ndarray:
        opened = self._opened[file]
        try:
            return opened.read(piece, size, box)
        except (DamagedPieces, OSError) as error:
            warn(f"copies in memory: {error}; this file is not used")
            raise _FileLost(file, opened) from error
