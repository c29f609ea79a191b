"""Reads the text of any part of a streamed dataset."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.formats.compressed import compression, import_pyarrow
from jaxpar.data.formats.readers import JSON_OBJECT, ROW
from jaxpar.data.stream.index import StreamIndex
from jaxpar.data.stream.recent import Recent
from jaxpar.data.stream.tables import Table, open_table

#: Bytes of a frame or a row group, decompressed; more is refused when the index is made.
MAX_BLOCK = 64 << 20

#: Bytes of frames and row groups that a process keeps.
KEPT_BLOCKS = 4 * MAX_BLOCK

#: Files that a process keeps open.
OPEN_FILES = 128


class UnreadableText(ValueError):
    """A part whose text is not where the index says."""


class Texts:
    """The texts of a streamed dataset, by part."""

    def __init__(self, index: StreamIndex):
        self._index = index
        self._blocks = Recent[Any](KEPT_BLOCKS)
        self._files = Recent[int](OPEN_FILES, os.close)
        self._tables = Recent[Table](OPEN_FILES)

    def text(self, part: np.ndarray) -> str:
        """Return the text of a part.

        Args:     part: PART scalar.
        Raises:   UnreadableText if there is no such text; OSError if the file cannot be read.
        """
        number, kind, start = int(part["file"]), int(part["kind"]), int(part["start"])
        if number >= len(self._index.files):
            raise UnreadableText(f"there is no file {number:,}")
        path = Path(self._index.files[number].path)
        try:
            if kind == ROW:
                text = self._table(number, path).row(start)
            else:
                text = self._bytes(number, path, start, int(part["size"])).decode("utf-8")
            if kind == JSON_OBJECT:
                text = json.loads(text)[self._index.text_field]
        except OSError:
            raise
        except Exception as error:  # pyarrow's, of JSON and of UTF-8
            raise UnreadableText(f"{path}: {' '.join(str(error).split())}") from error
        first = int(part["first"])
        return text[first : first + int(part["chars"])]

    def _table(self, number: int, path: Path) -> Table:
        table = self._tables.get(number)
        if table is None:
            table = open_table(path, self._index.text_field, self._blocks)
            self._tables.keep(number, table, 1)
        return table

    def _bytes(self, number: int, path: Path, start: int, size: int) -> bytes:
        if not compression(path):
            return self._read(number, path, start, size)
        frames, found = self._index.frames_of(number), b""
        at = int(np.searchsorted(frames[:, 2], start, side="right")) - 1
        while len(found) < size and at < len(frames):
            text = self._frame(number, path, frames[at])
            skipped = start + len(found) - int(frames[at][2])
            found += text[skipped : skipped + size - len(found)]
            at += 1
        return found

    def _frame(self, number: int, path: Path, frame: np.ndarray) -> bytes:
        start, size, _, text_size = map(int, frame)
        text = self._blocks.get((number, start))
        if text is None:
            pyarrow = import_pyarrow(path)
            packed = self._read(number, path, start, size)
            text = pyarrow.decompress(packed, text_size, codec="zstd", asbytes=True)
            self._blocks.keep((number, start), text, text_size)
        return bytes(text)

    def _read(self, number: int, path: Path, start: int, size: int) -> bytes:
        file = self._files.get(number)
        if file is None:
            file = self._files.keep(number, os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1)
        found = b""
        while len(found) < size:
            more = os.pread(file, size - len(found), start + len(found))
            if not more:
                raise UnreadableText(f"{path} ends at byte {start + len(found):,}")
            found += more
        return found
