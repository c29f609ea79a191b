"""The format of a file of pieces: bytes of arrays, then an index that says which they are.

    the pieces, one after the other, each from a multiple of ALIGNMENT
    the index, as JSON: the pieces, the checksum of each block of BLOCK bytes of them, and the
        metadata of a checkpoint (`checkpoint.Saved`)
    the tail: MAGIC, the length of the index, its checksum

A block is read as a whole, and compared with its checksum; so any bytes can be read verified.
Imports no JAX.
"""

import functools
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from msgspec import Meta

from jaxpar.config import declared
from jaxpar.config.declared import Count, Name
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.memory_checkpoint.client import PieceClient
from jaxpar.sharding.grid import Box, extent

#: Bytes that a checksum is of, and that a reader reads at least.
BLOCK = 1 << 20

#: Pieces begin on multiples of this.
ALIGNMENT = 64

#: Threads that compute checksums.
THREADS = min(8, os.cpu_count() or 1)

#: Most bytes of an index.
MAX_INDEX = 256 << 20

_MAGIC, _TAIL = b"jaxparm1", struct.Struct("<8sQI")


class DamagedPieces(Exception):
    """A file of pieces is not what was written."""


@dataclass(frozen=True)
class ArrayType:
    """An array of the state."""

    name: Name
    """As in a checkpoint: "params/layers/wq"."""
    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]


@dataclass(frozen=True)
class ArrayPiece:
    """A part of an array, and where its bytes are in the file, in C order."""

    array: Count
    """Index into `PieceIndex.arrays`."""
    edges: tuple[tuple[int, int], ...]
    """Begin and end of its box in each dim."""
    begin: Count

    @property
    def box(self) -> Box:
        """The part of the array."""
        return tuple(slice(*edges) for edges in self.edges)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return extent(self.box)


@dataclass(frozen=True)
class PieceIndex:
    """What a file of pieces holds."""

    arrays: tuple[ArrayType, ...]
    """All arrays of the state, also those of which the file has no piece."""
    pieces: tuple[ArrayPiece, ...]
    num_bytes: Count
    """Bytes before the index."""
    checksums: tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...] = ()
    """CRC-32 of each block."""
    about: dict[str, Any] = field(default_factory=dict)
    """Metadata of the state."""

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if piece.array >= len(self.arrays):
                raise ValueError("a piece is of no array")
            shape = self.arrays[piece.array].shape
            within = (0 <= b <= e <= n for (b, e), n in zip(piece.edges, shape, strict=False))
            if len(piece.edges) != len(shape) or not all(within) or piece.begin > self.num_bytes:
                raise ValueError(f"a piece of {self.arrays[piece.array].name} is outside it")


def place_pieces(
    arrays: Sequence[ArrayType], parts: Sequence[tuple[int, Box]], sizes: Callable[[str], int]
) -> PieceIndex:
    """Return an index with a place for each part.

    Args:     parts: array and box of each piece. sizes: returns the bytes of an element.
    """
    pieces, at = [], 0
    for number, box in parts:
        edges = tuple((part.start, part.stop) for part in box)
        pieces.append(piece := ArrayPiece(number, edges, at))
        at += math.prod(piece.shape) * sizes(arrays[number].dtype)
        at += -at % ALIGNMENT
    return PieceIndex(tuple(arrays), tuple(pieces), at)


def with_content(index: PieceIndex, sums: tuple[int, ...], about: dict[str, Any]) -> PieceIndex:
    """Return an index with the checksums and the metadata of one copy."""
    return replace(index, checksums=sums, about=about)


def checksums(memory: memoryview) -> tuple[int, ...]:
    """Return the checksum of each block. Python's lock is free meanwhile."""
    blocks = [memory[at : at + BLOCK] for at in range(0, memory.nbytes, BLOCK)]
    return tuple(_threads().map(zlib.crc32, blocks))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="checksums")


def write_index(fd: int, index: PieceIndex) -> None:
    """Write the index behind the pieces, and cut the file there. Raises:   OSError."""
    text = declared.to_json(index).encode()
    content = text + _TAIL.pack(_MAGIC, len(text), zlib.crc32(text))
    at, view = index.num_bytes, memoryview(content)
    while view:
        done = os.pwrite(fd, view, at)
        at, view = at + done, view[done:]
    os.ftruncate(fd, at)


class ByteSource(Protocol):
    """Bytes of a file, on this host or another."""

    where: str
    size: int

    def view(self, begin: int, end: int) -> memoryview:
        """Return bytes of the file. Raises:   OSError."""


class LocalBytes:
    """A file of this host, mapped into memory."""

    def __init__(self, path: Path):
        """Raises:   OSError when there is no such file."""
        self.where, self.size = str(path), path.stat().st_size
        with open(path, "rb") as file:
            self._memory = memoryview(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
            )

    def view(self, begin: int, end: int) -> memoryview:
        """As `ByteSource.view`; copies nothing."""
        return self._memory[begin:end]


class RemoteBytes:
    """A file of another host."""

    def __init__(self, client: Callable[[], PieceClient], name: str, size: int):
        """Args:     client: returns the connection that the calling thread uses."""
        self.where, self.size = f"{name} of {client().address}", size
        self._client, self._name = client, name

    def view(self, begin: int, end: int) -> memoryview:
        """As `ByteSource.view`."""
        memory = memoryview(np.empty(end - begin, np.uint8))
        self._client().read(self._name, begin, memory)
        return memory


class StoredPieces:
    """A complete file of pieces. Every byte that is read is verified."""

    def __init__(self, source: ByteSource):
        """Read the index. Raises:   DamagedPieces; OSError."""
        self._source, self._is_local = source, isinstance(source, LocalBytes)
        self.index = _read_index(source)
        self._verified: set[int] = set()
        self._last: tuple[int, int, memoryview] | None = None

    @property
    def where(self) -> str:
        """The path of the file, with its host."""
        return self._source.where

    def read(self, piece: ArrayPiece, size: int, box: Box | None = None) -> np.ndarray:
        """Return a piece's bytes, or those from the first to the last row of a box.

        Args:     size: bytes of an element. box: within the piece, counted as in the whole array;
                  only its first dim counts. None: all of it.
        Returns:  uint8 [rows, bytes of a row]; [1, bytes] of a scalar. Do not write to it.
        Raises:   DamagedPieces; OSError.
        """
        rows = piece.shape[0] if piece.shape else 1
        row = math.prod(piece.shape[1:]) * size
        first, last = 0, rows
        if box and piece.edges:
            first, last = (edge - piece.edges[0][0] for edge in (box[0].start, box[0].stop))
        if piece.begin + rows * row > self.index.num_bytes:
            raise DamagedPieces(f"a piece in {self.where} is longer than the file")
        content = self._bytes(piece.begin + first * row, piece.begin + last * row)
        return np.frombuffer(content, np.uint8).reshape(last - first, row)

    def _bytes(self, begin: int, end: int) -> memoryview:
        first, last = begin // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, self.index.num_bytes)
        recent = self._last
        if recent is not None and recent[0] <= first and last <= recent[1]:
            return recent[2][begin - recent[0] : end - recent[0]]
        content = self._source.view(first, last)
        self._verify(first // BLOCK, content)
        if not self._is_local:  # the next piece, if it is small, may be in the last block
            begins = max(first, (last - 1) // BLOCK * BLOCK)
            self._last = begins, last, memoryview(bytes(content[begins - first :]))
        return content[begin - first : end - first]

    def _verify(self, first: int, content: memoryview) -> None:
        """Compare blocks, from the block `first` on. Raises:   DamagedPieces."""
        last = first + -(-content.nbytes // BLOCK)
        if self._is_local and self._verified.issuperset(range(first, last)):
            return
        for block, found in enumerate(checksums(content), first):
            if found != self.index.checksums[block]:
                raise DamagedPieces(f"block {block} of {self.where} differs from what was written")
        self._verified.update(range(first, last))


def _read_index(source: ByteSource) -> PieceIndex:
    """Raises:   DamagedPieces; OSError."""
    damaged = DamagedPieces(f"{source.where} is cut off, or its index is damaged")
    tail = source.size - _TAIL.size
    if tail < 0:
        raise damaged
    magic, length, checksum = _TAIL.unpack(source.view(tail, source.size))
    if magic != _MAGIC or length > min(tail, MAX_INDEX):
        raise damaged
    text = source.view(tail - length, tail)
    if zlib.crc32(text) != checksum:
        raise damaged
    try:
        index = declared.read(PieceIndex, bytes(text), what=source.where, max_bytes=MAX_INDEX)
    except UnreadableJson as error:
        raise DamagedPieces(str(error)) from error
    if index.num_bytes != tail - length or len(index.checksums) != -(-index.num_bytes // BLOCK):
        raise damaged
    return index
