"""Arrays that are not in memory: in files, and the parts of a dataset in a row."""

import abc
import functools
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxpar.config import ConfigError


class WindowedArray(abc.ABC):
    """Integers [N] that are not in memory. A slice is an array, and is read as one stretch."""

    dtype: np.dtype
    _length: int

    @abc.abstractmethod
    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""

    @abc.abstractmethod
    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        """

    def begin(self, starts: np.ndarray, length: int) -> Callable[[], np.ndarray]:
        """Begin to read stretches, and return what waits for them and returns them."""
        return functools.partial(self.windows, starts, length)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._length * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: "int | slice | np.ndarray") -> np.ndarray:
        if isinstance(key, np.ndarray):
            return self.windows(key, 1)[:, 0]
        if not isinstance(key, slice):
            return self.windows(np.array([range(self._length)[key]]), 1)[0, 0]
        first, end, step = key.indices(self._length)
        found: np.ndarray = self.windows(np.array([first]), max(end - first, 0))[0, ::step]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)


#: Files that are open at a time: below the limit of most systems, 1024.
MAX_OPEN = 200


class FileArray(WindowedArray):
    """Integers [N] in a file, which is open while it is among the last MAX_OPEN that are read."""

    def __init__(self, file: Path, dtype: np.dtype, length: int, header_bytes: int = 0):
        """Raises:   OSError if the file cannot be read."""
        self.file, self.dtype, self._length = file, dtype, length
        self.header_bytes = header_bytes
        _opened(self)

    def begin(self, starts: np.ndarray, length: int) -> Callable[[], np.ndarray]:
        """As `WindowedArray.begin`: the disk reads all of them at the same time."""
        opened, size = _opened(self), length * self.dtype.itemsize
        for at in self._bytes_before(starts):
            os.posix_fadvise(opened.number, at, size, os.POSIX_FADV_WILLNEED)
        return functools.partial(self._read, starts, length)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Raises:   ConfigError("data.path", ...) for a file that is too short; OSError.
        """
        return self.begin(starts, length)()

    def _read(self, starts: np.ndarray, length: int) -> np.ndarray:
        found = np.empty((len(starts), length), self.dtype)
        if not found.size:
            return found
        opened, rows = _opened(self), found.view(np.uint8)
        for row, start in zip(rows, self._bytes_before(starts), strict=True):
            opened.read(row, start)
        return found

    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""
        (at,) = self._bytes_before(np.array([token]))
        return f"token {token:,} of {self.file} (byte {at:,})"

    def _bytes_before(self, elements: np.ndarray) -> list[int]:
        found: list[int] = (self.header_bytes + elements * self.dtype.itemsize).tolist()
        return found


class _Opened:
    """An open file, which is closed when nobody refers to it."""

    def __init__(self, file: Path):
        self._file, self.number = file, os.open(file, os.O_RDONLY)
        # Otherwise, the system reads up to MiB around the KiB of a sequence.
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, into: np.ndarray, start: int) -> None:
        """Fill an array, uint8 [bytes]. A read returns at most 2 GiB."""
        done = 0
        while done < len(into):
            count = os.preadv(self.number, [into[done:]], start + done)
            if count == 0:
                rule = f"{self._file} ends before byte {start + len(into):,}"
                raise ConfigError("data.path", str(self._file), rule, "copy the file again")
            done += count

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@functools.lru_cache(MAX_OPEN)
def _opened(array: FileArray) -> _Opened:
    return _Opened(array.file)


#: Numbers that a search reads at once: a page.
PAGE = 512


class SortedFile(FileArray):
    """Increasing int64 in a file, which is searched by reading a few pages.

    A map would be simpler, but after some batches all of it counts as memory of the process.
    """

    #: What the last search read for each value: the place of the first number, and the numbers.
    _pages: tuple[tuple[int, np.ndarray], ...] = ()

    def searchsorted(self, v: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
        """As `np.searchsorted`."""
        before, pages, found = self._pages, list[tuple[int, np.ndarray]](), list[int]()
        opened = _opened(self)
        for i, value in enumerate(v.ravel().tolist()):
            first, page = before[i] if i < len(before) else (0, np.zeros(0, np.int64))
            at = int(page.searchsorted(value, side))
            if not 0 < at < len(page):  # the end of a sequence is near its start
                first, page = self._page_of(opened, value, side)
                at = int(page.searchsorted(value, side))
            pages.append((first, page))
            found.append(first + at)
        self._pages = tuple(pages)
        return np.array(found, np.int64).reshape(v.shape)

    def _page_of(
        self, opened: "_Opened", value: int, side: Literal["left", "right"]
    ) -> tuple[int, np.ndarray]:
        """Return the page that a search ends in, and the place of its first number.

        The first guess is right if documents are about as long everywhere. Every third is half way,
        so that a search ends soon in any file.
        """
        low, high, below, above, tries = 0, len(self), 0, self._last, 0
        while high - low > PAGE:
            share = 0.5 if tries % 3 == 2 else (value - below) / max(above - below, 1)
            guess = low + int((high - low) * min(max(share, 0.0), 1.0)) - PAGE // 2
            first = min(max(guess, low), high - PAGE)
            page = self._numbers(opened, first, PAGE)
            at = int(page.searchsorted(value, side))
            if 0 < at < PAGE:
                return first, page
            if at == 0:
                high, above = first, int(page[0])
            else:
                low, below = first + PAGE, int(page[-1])
            tries += 1
        return low, self._numbers(opened, low, high - low)

    @functools.cached_property
    def _last(self) -> int:
        return int(self[-1])

    def _numbers(self, opened: "_Opened", first: int, count: int) -> np.ndarray:
        found = np.empty(count, self.dtype)
        opened.read(found.view(np.uint8), self.header_bytes + first * self.dtype.itemsize)
        return found

    def __getitem__(self, key: int | slice | np.ndarray) -> np.ndarray:
        if not isinstance(key, np.ndarray):
            return super().__getitem__(key)
        pages, opened, found = self._pages, _opened(self), np.empty(len(key), self.dtype)
        edges = [0, *(np.flatnonzero(np.diff(key) != 1) + 1).tolist(), len(key)]
        for i, (start, stop) in enumerate(itertools.pairwise(edges if len(key) else [])):
            first, page = pages[i] if i < len(pages) else (0, found[:0])
            at, count = int(key[start]) - first, stop - start
            if 0 <= at <= len(page) - count:
                found[start:stop] = page[at : at + count]
            else:
                found[start:stop] = self._numbers(opened, first + at, count)
        return found


def mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    """Map numbers in a file, of which few, at random places, are read."""
    with open(file, "rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    content.madvise(mmap.MADV_RANDOM)  # otherwise, as for `_Opened`
    return np.frombuffer(content, dtype)


class Joined(WindowedArray):
    """Arrays in a row, as one. A stretch may cross their ends."""

    def __init__(self, arrays: Sequence[WindowedArray]):
        """Args:     arrays: none is empty."""
        self.arrays = tuple(arrays)
        self.dtype = np.result_type(*(array.dtype for array in arrays))
        self._ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        self._length = int(self._ends[-1])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length]."""
        found = np.empty((len(starts), length), self.dtype)
        if not found.size:
            return found
        first, last = (self._array_of(starts + more) for more in (0, length - 1))
        begun = []
        for number in np.unique(first[first == last]):
            rows = np.flatnonzero((first == number) & (last == number))
            local = starts[rows] - self._before(number)
            begun.append((rows, self.arrays[number].begin(local, length)))
        for rows, wait in begun:
            found[rows] = wait()
        for row in np.flatnonzero(first != last):
            start, at = int(starts[row]), 0
            for number in range(first[row], last[row] + 1):
                begin = start + at - self._before(number)
                piece = self.arrays[number][begin : begin + length - at]
                found[row, at : at + len(piece)] = piece
                at += len(piece)
        return found

    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""
        number = int(self._array_of(np.array(token)))
        return self.arrays[number].place(token - self._before(number))

    def _array_of(self, elements: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, elements, side="right")

    def _before(self, number: int) -> int:
        return int(self._ends[number]) - len(self.arrays[number])


class DocumentOffsets:
    """The document offsets of parts in a row: int64 [documents + 1], increasing from 0."""

    def __init__(self, parts: Sequence[np.ndarray | SortedFile]):
        """Args:     parts: int64 [documents + 1] each, increasing from 0 to the tokens of it."""
        self.parts = tuple(parts)
        #: Tokens and documents before each part, and all of them: int64 [parts + 1].
        self.tokens_before, self.documents_before = (
            np.cumsum([0, *counts], dtype=np.int64)
            for counts in ([part[-1] for part in parts], [len(part) - 1 for part in parts])
        )

    def __len__(self) -> int:
        return int(self.documents_before[-1]) + 1

    def __getitem__(self, key: "int | slice | np.ndarray") -> Any:
        if isinstance(key, slice):
            first, end, step = key.indices(len(self))
            pieces, before = [np.zeros(0, np.int64)], self.documents_before
            for i, part in enumerate(self.parts):
                last = len(part) - 1 + (i == len(self.parts) - 1)
                some = slice(max(first - before[i], 0), min(end - before[i], last))
                if some.start < some.stop:
                    pieces.append(part[some] + self.tokens_before[i])
            return np.concatenate(pieces)[::step]
        wanted = np.atleast_1d(np.asarray(key))
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"document {key} of {len(self) - 1:,}")
        number = np.searchsorted(self.documents_before[1:-1], wanted, side="right")
        found = self.tokens_before[number]
        for part in np.unique(number):
            here = number == part
            found[here] += self.parts[part][wanted[here] - self.documents_before[part]]
        return found.reshape(np.shape(key))[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.int64)

    def searchsorted(
        self, v: Any, side: Literal["left", "right"] = "left", sorter: None = None
    ) -> np.ndarray:
        """Return how many offsets are below each value, or, with side "right", not above it.

        Args:     v: integers [N]. sorter: None, for `np.searchsorted`.
        """
        values = np.atleast_1d(np.asarray(v))
        number = np.searchsorted(self.tokens_before[1:-1], values, side=side)
        found = self.documents_before[number]
        for part in np.unique(number):
            here = number == part
            local = values[here] - self.tokens_before[part]
            found[here] += self.parts[part].searchsorted(local, side=side)
        return found.reshape(np.shape(v))[()]

    def most(self, length: int, of_parts: Sequence[Sequence[int]] = ()) -> int:
        """Return how many documents begin within some tokens in a row, at most.

        Args:     length: tokens, a power of two. of_parts: `most_documents` of each part, if they
                  are known. Then only the documents near the ends of parts are read.
        """
        at, ends, count = length.bit_length() - 1, self.tokens_before[1:-1], len(self) - 1
        known = [table[min(at, len(table) - 1)] for table in of_parts]
        found = known or [_most(part, length) for part in self.parts]
        first, end = self.searchsorted(ends - length), self.searchsorted(ends + length)
        spans = [np.arange(*span) for span in zip(first, np.minimum(end, count), strict=True)]
        near = self[np.unique(np.concatenate([np.zeros(0, np.int64), *spans]))]
        return max(*found, int(_counts(near, near, length).max(initial=1)))


#: Documents that are looked at together.
AT_ONCE = 1 << 20

#: Sequences have at most 2^MAX_BITS tokens.
MAX_BITS = 24


def most_documents(offsets: np.ndarray | SortedFile) -> list[int]:
    """Return how many documents of a part begin within 2^k tokens in a row, at most, for each k.

    The last number is that of all documents, or of 2^MAX_BITS tokens.

    Args:     offsets: int64 [documents + 1].
    """
    found: list[int] = []
    while len(found) <= MAX_BITS and (not found or found[-1] < len(offsets) - 1):
        found.append(_most(offsets, 1 << len(found)))
    return found


def _most(offsets: np.ndarray | SortedFile, length: int) -> int:
    most, count = 0, len(offsets) - 1
    for first in range(0, count, AT_ONCE):
        last = min(first + AT_ONCE, count) - 1
        end = int(offsets.searchsorted(np.asarray(offsets[last] + length)))
        some = offsets[first : min(end, count)]
        most = max(most, int(_counts(some, some[: last + 1 - first], length).max()))
    return most


def _counts(offsets: np.ndarray, begins: np.ndarray, length: int) -> np.ndarray:
    """Return how many offsets are within some tokens after each of the first ones, and it."""
    return offsets.searchsorted(begins + length) - np.arange(len(begins))
