"""Rows of tokens that must be decoded, in blocks, as one array."""

import abc
import functools
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import WindowedArray
from jaxpar.data.formats.token_file import MAX_TOKEN, TokenFile, identity, keep, recall

#: The columns that have the tokens, the first that is there.
COLUMNS = ("input_ids", "tokens")

#: Blocks that an array keeps decoded.
KEPT = 2


class RowReader(abc.ABC):
    """A file of rows of tokens, which is read by blocks of rows."""

    path: Path
    num_blocks: int

    @abc.abstractmethod
    def read(self, block: int) -> list[np.ndarray]:
        """Return the rows of a block: integers [tokens] each, none above MAX_TOKEN.

        Raises:   ConfigError("data.path", ...) for a damaged file, or what are no tokens.
        """


class RowTokens(WindowedArray):
    """The tokens of a file of rows, in a row."""

    dtype = np.dtype("<u4")

    def __init__(self, rows: RowReader, ends: np.ndarray):
        """Args:     ends: int64 [blocks], the tokens up to the end of each block."""
        self._rows, self._ends, self._length = rows, ends, int(ends[-1])
        self.file = rows.path
        self._block = functools.lru_cache(KEPT)(self._decoded)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length]."""
        found = np.empty((len(starts), length), self.dtype)
        for i in np.argsort(starts, kind="stable"):  # neighbors share a block
            at = 0
            while at < length:
                block = int(np.searchsorted(self._ends, starts[i] + at, side="right"))
                tokens = self._block(block)
                first = int(starts[i]) + at - (int(self._ends[block]) - len(tokens))
                piece = tokens[first : first + length - at]
                found[i, at : at + len(piece)] = piece
                at += len(piece)
        return found

    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""
        return f"token {token:,} of {self._rows.path}"

    def _decoded(self, block: int) -> np.ndarray:
        tokens = np.concatenate([np.zeros(0, self.dtype), *self._rows.read(block)])
        before = int(self._ends[block - 1]) if block else 0
        if len(tokens) != self._ends[block] - before:
            rule = f"has changed since it was opened, in block {block}"
            raise broken(self._rows.path, rule, "start again")
        return tokens.astype(self.dtype)


def open_rows(rows: RowReader, cached: bool) -> TokenFile | None:
    """Return the tokens of rows, each of which is a document. None: there are no tokens.

    The lengths of all rows take a pass over the file.

    Args:     cached: as in `TokenFile`; the result is then cached, too.
    """
    name = identity(rows.path, type(rows).__name__, VERSION) if cached else ""
    found = recall(name) if cached else None
    if found is None:
        lengths, ends = [np.zeros(1, np.int64)], []
        for block in range(rows.num_blocks):
            lengths.append(np.array([len(row) for row in rows.read(block)], np.int64))
            ends.append(lengths[-1].sum())
        found = {"offsets": np.cumsum(np.concatenate(lengths)), "ends": np.cumsum(ends)}
        if cached:
            keep(name, found)
    if not len(found["ends"]) or not found["ends"][-1]:
        return None
    tokens = RowTokens(rows, found["ends"])
    offsets = np.unique(found["offsets"])
    return TokenFile(rows.path, tokens, offsets, rows=True, cached=cached)


#: Increased when `open_rows` finds other results.
VERSION = 1


def as_tokens(values: Any, where: str) -> np.ndarray:
    """Return a row as integers [tokens]. Raises:   ConfigError for what are no tokens."""
    row = np.asarray(values)
    if row.ndim == 1 and row.size == 0:
        return row.astype(RowTokens.dtype)
    if row.ndim != 1 or row.dtype.kind not in "ui":
        raise broken(where, f"has {row.dtype} {list(row.shape)}, not a list of tokens")
    if row.min() < 0 or row.max() > MAX_TOKEN:
        at = int(np.argmax((row < 0) | (row > MAX_TOKEN)))
        raise broken(where, f"has token {row[at]} at {at}, not one from 0 to {MAX_TOKEN:,}")
    return row


def broken(where: Path | str, rule: str, fix: str = "copy it again") -> ConfigError:
    """Return the error for a place in a file."""
    return ConfigError("data.path", str(where), rule, fix)
