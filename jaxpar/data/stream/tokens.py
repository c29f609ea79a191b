"""The tokens of a streamed split, as an array that tokenizes what is read of it."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import SortedFile, WindowedArray
from jaxpar.data.formats.meta import Meta
from jaxpar.data.stream.index import (
    PREPARE_AGAIN,
    StreamIndex,
    check_files,
    map_parts,
    read_index,
)
from jaxpar.data.stream.texts import PartEncoder
from jaxpar.data.stream.workers import pool


class StreamedTokens(WindowedArray):
    """Unsigned integers [num_tokens]: what `prepare` would write of the same text.

    A slice is an array. It is tokenized by parts, which begin at any token, and ends of text lie
    between documents.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        meta: Meta,
        workers: int,
        index: StreamIndex,
        parts: tuple[np.ndarray, np.ndarray],
        document_offsets: SortedFile,
    ):
        self._folder, self._workers, self._eos_id = str(folder.resolve()), workers, meta.eos_id
        self.index, self.split = index, split
        self.parts, self.starts = parts
        self.dtype = np.dtype(meta.dtype).newbyteorder("<")
        self._offsets = document_offsets
        self._length = meta.splits[split].num_tokens

    @classmethod
    def open(
        cls, folder: Path, split: str, meta: Meta, workers: int, document_offsets: SortedFile
    ) -> "StreamedTokens":
        """Open a split of a streamed dataset.

        Args:     workers: processes that tokenize; 0: this one. document_offsets: int64
                  [documents + 1].
        Raises:   ConfigError("data.path", ...) if the index is damaged, or a file of the text is
                  missing or has changed.
        """
        index = read_index(folder)
        parts = map_parts(folder, split, meta.splits[split].num_tokens)
        check_files(index)
        return cls(folder, split, meta, workers, index, parts, document_offsets)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of tokens: [N, length].

        Args:     starts: int64 [N], first tokens; start + length is at most num_tokens.
        Raises:   as `PartEncoder.encode`; ConfigError("data.path", ...) if parts are not in order.
        """
        found = np.full((len(starts), length), self._eos_id, self.dtype)
        known = np.zeros(found.shape, bool)
        begins = self.starts
        firsts = np.maximum(np.searchsorted(begins, starts, side="right") - 1, 0)
        stops = np.searchsorted(begins, starts + length, side="left")
        spans = [np.arange(*span) for span in zip(firsts, stops, strict=True)]
        needed = np.unique(np.concatenate(spans))
        parts = np.ascontiguousarray(self.parts[needed])
        ids = dict(zip(needed.tolist(), self._encode(parts), strict=True))
        for row, filled, start, first, end in zip(found, known, starts, firsts, stops, strict=True):
            for number in range(first, end):
                at = int(begins[number]) - int(start)
                part = ids[number][max(-at, 0) : length - at]
                row[max(at, 0) : max(at, 0) + len(part)] = part
                filled[max(at, 0) : max(at, 0) + len(part)] = True
            about = self._offsets.searchsorted(np.array([start + 1, start + length]))
            ends = self._offsets[about[0] : about[1] + 1] - 1 - start
            filled[ends[ends < length]] = True
        if not known.all():
            rule = f"has parts of {self.split} that are not in the order of their tokens"
            raise ConfigError("data.path", self._folder, rule, PREPARE_AGAIN)
        return found

    @functools.cached_property
    def _encode(self) -> Callable[[np.ndarray], list[np.ndarray]]:
        if self._workers:
            return functools.partial(pool(self._workers).encode, self._folder)
        return PartEncoder(self._folder).encode

    def place(self, token: int) -> str:
        """Return the place of a token, for an error."""
        number = max(int(np.searchsorted(self.starts, token, side="right")) - 1, 0)
        part = self.parts[number]
        path = self.index.files[int(part["file"])].path
        return f"token {token:,} of {self._folder} ({path}, at {int(part['start']):,})"
