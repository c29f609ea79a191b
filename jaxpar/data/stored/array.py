"""Numbers in an object of a store, as an array that is read by parts."""

import numpy as np

from jaxpar.data.formats.windowed import WindowedArray
from jaxpar.stores.cache import PART_BYTES, CachedObject


class StoredArray(WindowedArray):
    """Integers [N] of an object. A slice is an array, and is read through the cache."""

    def __init__(self, stored: CachedObject, dtype: np.dtype):
        self.stored, self.dtype = stored, dtype
        self._length = stored.size // dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return self.stored.size

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length]. What is not in the cache is fetched at once.

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        Raises:   ObjectDamaged, StoreError.
        """
        found = np.empty((len(starts), length), self.dtype)
        if not found.size:
            return found
        firsts = np.asarray(starts, np.int64) * self.dtype.itemsize
        lasts = firsts + length * self.dtype.itemsize
        spans = zip(firsts // PART_BYTES, (lasts - 1) // PART_BYTES, strict=True)
        self.stored.fetch(np.unique([n for a, b in spans for n in range(a, b + 1)]).tolist())
        for row, first, last in zip(found, firsts.tolist(), lasts.tolist(), strict=True):
            row[:] = np.frombuffer(self.stored.read(first, last), self.dtype)
        return found

    def place(self, token: int) -> str:
        """Return the place of a token, for an error."""
        return f"token {token:,} of {self.stored.place} (byte {token * self.dtype.itemsize:,})"
