"""An array of numbers that are not in memory, and are read by stretches."""

import abc

import numpy as np


class WindowedArray(abc.ABC):
    """Integers [N]. A slice is an array, and is read as one stretch."""

    dtype: np.dtype
    _length: int

    @abc.abstractmethod
    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        """

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | slice) -> np.ndarray:
        if not isinstance(key, slice):
            return self.windows(np.array([range(self._length)[key]]), 1)[0, 0]
        first, end, step = key.indices(self._length)
        found: np.ndarray = self.windows(np.array([first]), max(end - first, 0))[0, ::step]
        return found
