"""The memory of one copy: files of this host, mapped, to which devices copy pieces directly."""

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.memory_checkpoint import piece_file
from jaxpar.memory_checkpoint.places import OWN, PARTIAL, Group, PieceFile
from jaxpar.memory_checkpoint.plan import ProcessPieces
from jaxpar.runtime.gpus.host_copies import (
    CudaError,
    PinnedMemory,
    copy_by_numpy,
    copy_to_host,
)
from jaxpar.sharding.fingerprint import named_leaves


class Slot:
    """One or two files of this process, as large as its pieces, used for one copy after another.

    A file has the name of its copy while it is complete, and another one while it is written. The
    memory is allocated ahead: writing to a mapped file for which there is no room would end the
    process.
    """

    def __init__(self, folder: Path, pieces: ProcessPieces, process: int, number: int):
        """Args:     folder: of the host. number: tells the slots of a process apart."""
        self._pieces, self._process = pieces, process
        self._files = [
            MappedFile(folder / OWN / f"{PARTIAL}{process}.{number}.{kind}", index.num_bytes)
            for kind, index in (("single", pieces.single), ("shared", pieces.shared))
            if index.num_bytes
        ]
        self._indices = [i for i in (pieces.single, pieces.shared) if i.num_bytes]
        self._allocated: Future[None] | None = None

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Start to allocate the memory on a thread, or again if that has failed."""
        if self._allocated is None or self.failure is not None:
            self.begin_again(threads)

    def begin_again(self, threads: ThreadPoolExecutor) -> None:
        """Start to allocate the memory in new files."""
        self._allocated = threads.submit(self._allocate)

    def _allocate(self) -> None:
        for file in self._files:
            file.allocate(jax.local_devices()[0])

    @property
    def ready(self) -> bool:
        """Whether the memory is there."""
        done = self._allocated is not None and self._allocated.done()
        return done and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """Why the memory could not be allocated; None as long as nothing has failed."""
        if self._allocated is None or not self._allocated.done():
            return None
        return self._allocated.exception()

    def drop(self) -> None:
        """Take back the name of the copy that the files hold. Raises:   OSError."""
        for file in self._files:
            file.rename(file.own_path)

    def copy(self, tree: Any) -> None:
        """Copy this process's pieces. Blocks until done.

        Args:     tree: the logical state.
        Raises:   OSError when a file is gone; jax.errors.JaxRuntimeError.
        """
        self.drop()
        leaves = list(named_leaves(tree).values())
        jax.block_until_ready(leaves)
        shards = [{shard.device: shard.data for shard in x.addressable_shards} for x in leaves]
        on_devices: list[tuple[jax.Array, np.ndarray]] = []
        on_host: list[tuple[jax.Array, np.ndarray]] = []
        for index, file in zip(self._indices, self._files, strict=True):
            for piece in index.pieces:
                source = shards[piece.array][self._pieces.devices[piece.array, piece.box]]
                memory = file.memory.content[piece.begin : piece.begin + source.nbytes]
                kind = leaves[piece.array].sharding.memory_kind
                (on_host if kind == "pinned_host" else on_devices).append((source, memory))
        try:
            copy_to_host(on_devices)
        except CudaError:
            on_host += on_devices
        copy_by_numpy(on_host)

    def complete(self, group: Group, about: dict[str, Any]) -> list[Path]:
        """Write the index of each file, and give it the name of its copy.

        Raises:   OSError.
        """
        for index, file in zip(self._indices, self._files, strict=True):
            file.write_index(index, about)
        for index, file in zip(self._indices, self._files, strict=True):
            name = PieceFile(group, self._process, index is self._pieces.shared)
            file.rename(file.own_path.with_name(str(name)))
        return [file.path for file in self._files]

    def close(self) -> None:
        """Free the mappings. The files of a complete copy stay; others are deleted."""
        for file in self._files:
            file.close()


class MappedFile:
    """A file in memory that is mapped into this process."""

    def __init__(self, path: Path, num_bytes: int):
        self.own_path = self.path = path
        self._num_bytes, self._fd = num_bytes, -1
        self.memory = PinnedMemory(np.empty(0, np.uint8))

    def allocate(self, device: jax.Device) -> None:
        """Make the file, with all its pages. Raises:   OSError when there is no room."""
        self.close()
        self._fd = os.open(self.own_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        os.posix_fallocate(self._fd, 0, self._num_bytes)
        self.path = self.own_path
        content = np.frombuffer(mmap.mmap(self._fd, self._num_bytes), np.uint8)
        self.memory = PinnedMemory(content, device)

    def rename(self, path: Path) -> None:
        """Rename the file. Raises:   OSError when it is gone."""
        if path != self.path:
            self.path.rename(path)
            self.path = path

    def write_index(self, index: piece_file.PieceIndex, about: dict[str, Any]) -> None:
        """Write the index of the pieces in memory behind them. Raises:   OSError."""
        sums = piece_file.checksums(memoryview(self.memory.content))
        piece_file.write_index(self._fd, piece_file.with_content(index, sums, about))

    def close(self) -> None:
        """Unmap the file, and delete it unless it is complete."""
        self.memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.own_path.unlink(missing_ok=True)
