"""Reads the text of any part of a streamed dataset."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.columns import ARROW_FILE
from jaxpar.data.formats.compressed import READ_BYTES, compression, import_pyarrow
from jaxpar.data.formats.readers import JSON_OBJECT, ROW
from jaxpar.data.stream.index import StreamIndex, check_of, read_index
from jaxpar.data.tokenizer import load_tokenizer

# ------------------------------ A cache that holds the most recently used values up to a total size


class Recent[Value]:
    """Remembers values by key. The one that was used least recently goes first."""

    def __init__(self, most: int, dropped: Callable[[Value], None] = lambda value: None):
        """
        Args:     most: total size of the values to keep. dropped: called with a value that goes.
        """
        self._most, self._dropped, self._total = most, dropped, 0
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, or None."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, value: Value, size: int) -> Value:
        """Remember a value, and forget others; a value above the total is kept alone."""
        self._held[key] = value, size
        self._total += size
        while self._total > self._most and len(self._held) > 1:
            _, (old, freed) = self._held.popitem(last=False)
            self._total -= freed
            self._dropped(old)
        return value


# -------------------------------------------------------- Rows of Parquet and Arrow files by number


class Table(Protocol):
    """The column of the text in an open file."""

    def row(self, number: int) -> str:
        """Return the text of a row."""
        ...

    def block_sizes(self) -> Iterator[int]:
        """Yield the bytes that are in memory at once to read a row, for each group of rows."""
        ...


def open_table(path: Path, field: str, blocks: Recent[Any]) -> Table:
    """Open a table.

    Args:     blocks: where to keep groups of rows that were decoded.
    """
    pyarrow = import_pyarrow(path)
    kind = ParquetTable if path.name.lower().endswith(".parquet") else ArrowTable
    return kind(pyarrow, path, field, blocks)


class ParquetTable:
    """A column of a Parquet file, which is decoded by row groups."""

    def __init__(self, pyarrow: Any, path: Path, field: str, blocks: Recent[Any]):
        self._file = pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
        self._path, self._field, self._blocks = path, field, blocks
        about = self._file.metadata
        counts = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        self._ends = np.cumsum(counts)

    def row(self, number: int) -> str:
        """Return the text of a row; decodes its row group unless that was read recently."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        key = self._path, group
        column = self._blocks.get(key)
        if column is None:
            table = self._file.read_row_group(group, columns=[self._field], use_threads=False)
            column = table.column(0)
            self._blocks.keep(key, column, column.nbytes)
        before = int(self._ends[group - 1]) if group else 0
        return str(column[number - before].as_py())

    def block_sizes(self) -> Iterator[int]:
        """Yield the decoded bytes of the column in each row group."""
        about = self._file.metadata
        for group in range(about.num_row_groups):
            columns = (about.row_group(group).column(i) for i in range(about.num_columns))
            inside = (c for c in columns if c.path_in_schema.split(".")[0] == self._field)
            yield sum(column.total_uncompressed_size for column in inside)


class ArrowTable:
    """A column of an Arrow file or stream, which is memory-mapped."""

    def __init__(self, pyarrow: Any, path: Path, field: str, blocks: Recent[Any]):
        source, before = pyarrow.memory_map(str(path)), pyarrow.total_allocated_bytes()
        with path.open("rb") as file:
            is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        self._column = reader.read_all().column(field)
        self._copied = pyarrow.total_allocated_bytes() - before

    def row(self, number: int) -> str:
        """Return the text of a row."""
        return str(self._column[number].as_py())

    def block_sizes(self) -> Iterator[int]:
        """Yield the bytes of the file in memory: about none, unless it is compressed."""
        yield self._copied


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


# --------- Tokenizes parts of a streamed dataset, and checks that the tokens are those of the index


#: Tokens that an encoder keeps, with 4 bytes each.
KEPT_TOKENS = 4 << 20


class PartEncoder:
    """Tokenizes parts of a dataset. The most recent ones are kept."""

    def __init__(self, folder: str | Path):
        """Load the index and the tokenizer of a dataset folder. Raises: ConfigError."""
        self._index = read_index(Path(folder))
        self._tokenizer = load_tokenizer(folder)
        self._texts = Texts(self._index)
        self._kept = Recent[np.ndarray](KEPT_TOKENS)

    def encode(self, parts: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each part: int32 [tokens].

        Args:     parts: PART [parts].
        Raises:   ConfigError("data.path", ...) if a text, or its tokens, are not those of the
                  index; OSError if a file cannot be read.
        """
        keys = [part.tobytes() for part in parts]
        found = [self._kept.get(key) for key in keys]
        missing = [i for i, ids in enumerate(found) if ids is None]
        for i, ids in zip(missing, self._encode(parts[missing]), strict=True):
            found[i] = self._kept.keep(keys[i], ids, len(ids))
        return [ids for ids in found if ids is not None]

    def _encode(self, parts: np.ndarray) -> Sequence[np.ndarray]:
        order = np.lexsort((parts["start"], parts["file"]))  # neighbors share a frame
        texts = [""] * len(parts)
        for i in order:
            try:
                texts[i] = self._texts.text(parts[i])
            except UnreadableText as error:
                raise _changed(self._index, parts[i], str(error)) from error
        encoded = self._tokenizer.encode_batch(texts)
        for part, ids in zip(parts, encoded, strict=True):
            if check_of(part, ids) != part["check"]:
                raise _changed(self._index, part, "its text has other tokens")
        return encoded


def _changed(index: StreamIndex, part: np.ndarray, why: str) -> ConfigError:
    path = index.files[int(part["file"])].path if part["file"] < len(index.files) else "a file"
    rule = f"is an index of {path}, which has changed since at {part['start']:,} ({why})"
    fix = f"restore it, or index again: prepare --stream --output {index.folder} --overwrite"
    return ConfigError("data.path", str(index.folder), rule, fix)
