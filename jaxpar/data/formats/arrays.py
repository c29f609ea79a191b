"""Arrays that are not in memory: files that are mapped, and the parts of a dataset in a row."""

import abc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

#: Arrays of other hosts that are read at once.
READS_AT_ONCE = 16


class WindowedArray(abc.ABC):
    """Integers [N] that are not in memory. A slice is an array, and is read as one stretch."""

    dtype: np.dtype
    #: Whether reading waits for another host, so that several arrays are read at once.
    waits = False
    _length: int

    @abc.abstractmethod
    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""

    @abc.abstractmethod
    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        """

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


class MappedArray(WindowedArray):
    """Integers [N] in a file, which is mapped."""

    def __init__(self, file: Path, dtype: np.dtype, length: int, header_bytes: int = 0):
        self.file, self.dtype, self._length = file, dtype, length
        self._start = header_bytes
        self._map = np.memmap(file, dtype, "r", offset=header_bytes, shape=(length,))

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length]."""
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, np.asarray(starts).tolist(), strict=True):
            row[:] = self._map[start : start + length]
        return found

    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""
        at = self._start + token * self.dtype.itemsize
        return f"token {token:,} of {self.file} (byte {at:,})"


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

        def read(number: int) -> None:
            rows = np.flatnonzero((first == number) & (last == number))
            local = starts[rows] - self._before(number)
            found[rows] = self.arrays[number].windows(local, length)

        numbers = np.unique(first[first == last]).tolist()
        if self.arrays[0].waits and len(numbers) > 1:
            with ThreadPoolExecutor(min(len(numbers), READS_AT_ONCE)) as pool:
                list(pool.map(read, numbers))
        else:
            for number in numbers:
                read(number)
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

    def __init__(self, parts: Sequence[np.ndarray]):
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
            key = np.arange(*key.indices(len(self)))
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
            found[here] += np.searchsorted(self.parts[part], local, side=side)
        return found.reshape(np.shape(v))[()]
