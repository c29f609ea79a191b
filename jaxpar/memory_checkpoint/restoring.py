"""Loads a copy of the state from the memory of hosts onto any mesh."""

import collections
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxpar.checkpoint.loading import agree, restore_from, verify
from jaxpar.config import Config
from jaxpar.memory_checkpoint.finding import FoundCopy, Hosts
from jaxpar.memory_checkpoint.piece_file import ArrayPiece, DamagedPieces, StoredPieces
from jaxpar.memory_checkpoint.places import MemoryPlace
from jaxpar.runtime.messages import warn
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.grid import Box, boxes_of, covers, extent, intersection, volume, within
from jaxpar.step.state import TrainState

#: Arrays that are assembled at a time.
AT_A_TIME = 8


def restore(cfg: Config, mesh: Mesh, place: MemoryPlace, found: FoundCopy) -> TrainState:
    """Restore the run's state onto this mesh, from a copy that any mesh has made.

    Returns:  as `checkpoint.restore`.
    Raises:   Damaged, in all processes, when a piece is damaged or lost wherever it was.
    """
    with Hosts(place) as hosts:
        load = lambda target, _: _load(target, found, place, hosts)  # noqa: E731
        return restore_from(cfg, mesh, found.saved, load)


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
