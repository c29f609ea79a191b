"""Rows of Parquet and Arrow files by number."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.formats.columns import ARROW_FILE
from jaxpar.data.formats.compressed import READ_BYTES, import_pyarrow
from jaxpar.data.stream.recent import Recent


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
