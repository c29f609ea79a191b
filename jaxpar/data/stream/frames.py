"""Finds the frames of a Zstandard file: each can be decompressed without those before it.

Source:   RFC 8878, section 3.1.
"""

import mmap
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpar.data.formats.compressed import READ_BYTES, damaged, import_pyarrow

_MAGIC, _SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
_RLE = 1


class Frame(NamedTuple):
    """A frame of a compressed file, and the text in it."""

    start: int
    """First byte in the file."""
    size: int
    """Compressed bytes."""
    text_start: int
    """First byte in the decompressed file."""
    text_size: int
    """Decompressed bytes."""


def find_frames(path: Path) -> list[Frame]:
    """Return the frames of a Zstandard file in order, but not the skippable ones.

    Reads the headers of frames and blocks. A frame that does not say how long its text is, is
    decompressed.

    Raises:   ConfigError for a file that is damaged or truncated.
    """
    size, frames, at, text_end = path.stat().st_size, list[Frame](), 0, 0
    if size == 0:
        raise _damaged(path, at)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while at < size:
            magic = int.from_bytes(data[at : at + 4], "little")
            if magic in _SKIPPABLE:
                at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
                continue
            if magic != _MAGIC or at + 6 > size:
                raise _damaged(path, at)
            end, text_size = _walk(data, at, size, path)
            if text_size is None:
                text_size = _decompressed_size(path, data, at, end)
            frames.append(Frame(at, end - at, text_end, text_size))
            at, text_end = end, text_end + text_size
    if at != size:
        raise _damaged(path, size)
    return frames


def _walk(data: mmap.mmap, start: int, size: int, path: Path) -> tuple[int, int | None]:
    """Return the end of a frame, and the length of its text if its header has it."""
    flags, at = data[start + 4], start + 5
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    at += (not single) + (0, 1, 2, 4)[flags & 3]  # window, dictionary
    width = (single, 2, 4, 8)[flags >> 6]
    text_size = int.from_bytes(data[at : at + width], "little") if width else None
    if text_size is not None and width == 2:
        text_size += 256
    at, last = at + width, False
    while not last:
        if at + 3 > size:
            raise _damaged(path, at)
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, block = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE else block)
    at += 4 * checksum
    if at > size:
        raise _damaged(path, size)
    return at, text_size


def _decompressed_size(path: Path, data: mmap.mmap, start: int, end: int) -> int:
    pyarrow = import_pyarrow(path)
    total = 0
    with path.open("rb") as file:
        file.seek(start)
        inner = pyarrow.PythonFile(_Part(file, end - start), mode="r")
        stream = pyarrow.CompressedInputStream(inner, "zstd")
        try:
            while found := stream.read(READ_BYTES):
                total += len(found)
        except OSError as error:
            raise damaged(path, "zstd", str(error)) from error
    return total


class _Part:
    """The next bytes of an open file, as a file."""

    closed = False

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` of the bytes that are left."""
        size = self._left if size < 0 else min(size, self._left)
        found = self._file.read(size)
        self._left -= len(found)
        return found

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


def _damaged(path: Path, at: int) -> Exception:
    return damaged(path, "zstd", f"byte {at:,}")
