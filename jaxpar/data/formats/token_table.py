"""Parquet and Arrow files with a column of lists of tokens."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxpar.data.formats.columns import ARROW_FILE
from jaxpar.data.formats.compressed import READ_BYTES, import_pyarrow
from jaxpar.data.formats.rows import COLUMNS, RowReader, as_tokens, broken, open_rows
from jaxpar.data.formats.token_file import Hints, TokenFile

#: Tokens of a block, which are decoded at once. Row groups of `datasets` have at most 100 MB; a
#: larger one is read in blocks of rows.
BLOCK_TOKENS = 32 << 20


class _Block(NamedTuple):
    group: int
    """Number of its row group, or Arrow batch."""
    number: int
    """Blocks of the group before it."""
    rows: int


class TableRows(RowReader):
    """A column of lists, by the row groups of Parquet and batches of Arrow, or parts of them."""

    def __init__(self, path: Path):
        """Raises:   ConfigError for a damaged file."""
        self.path = path
        with self._opened() as table:
            #: Its name; "" if the file has no tokens.
            self.column = _column_of(table.schema)
            self._blocks = _blocks(table, self.column) if self.column else []
        self.num_blocks = len(self._blocks)
        #: The block that comes next of a group that is being read, and what reads it.
        self._ahead: tuple[int, Iterator[list[np.ndarray]]] = -1, iter(())

    def read(self, block: int) -> list[np.ndarray]:
        """Return the rows of a block. Within a row group, reading begins at its first block."""
        (at, blocks), self._ahead = self._ahead, (-1, iter(()))  # each thread has its own
        if at != block:
            number = self._blocks[block].number
            blocks = itertools.islice(self._of_group(block - number), number, None)
        found = next(blocks, [])
        if block + 1 < self.num_blocks and self._blocks[block + 1].number:
            self._ahead = block + 1, blocks
        return found

    def _of_group(self, first: int) -> Iterator[list[np.ndarray]]:
        """Yield the rows of each block of a group. Args:     first: its first block."""
        pyarrow, group = import_pyarrow(self.path), self._blocks[first].group
        with self._opened() as table:
            found = table.columns(group, self.column, self._blocks[first].rows)
            for block, column in enumerate(found, first):
                where = f"{self.path}, block {block}"
                column.validate(full=True)  # Arrow would read other memory of a damaged file
                values = column.flatten()
                if column.null_count or values.null_count:
                    raise broken(where, "has a null among its tokens", "write it without nulls")
                lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
                if self._blocks[block]._replace(number=0) != (group, 0, len(lengths)):
                    raise broken(where, f"has {len(lengths):,} rows, and its footer says others")
                row = as_tokens(values.to_numpy(zero_copy_only=False), where)
                yield np.split(row, np.cumsum(lengths)[:-1])

    @contextmanager
    def _opened(self) -> Iterator["_Table"]:
        pyarrow = import_pyarrow(self.path)
        try:
            with self.path.open("rb") as file:
                yield _open_table(pyarrow, file, self.path)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno:  # of the system, not of the file
                raise
            why = " ".join(str(error).split())[:200]
            raise broken(self.path, f"is not readable {self.path.suffix[1:]} ({why})") from error


class _Table(NamedTuple):
    schema: Any
    sizes: Callable[[str], Iterator[tuple[int, int]]]
    """Rows of each group, and values of a column there."""
    columns: Callable[[int, str, int], Iterator[Any]]
    """Column of a group, in batches of at most this many rows: arrays of lists."""


def _open_table(pyarrow: Any, file: BinaryIO, path: Path) -> _Table:
    if path.suffix == ".parquet":
        opened = pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
        groups = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)]

        def sizes(name: str) -> Iterator[tuple[int, int]]:
            for group in groups:
                columns = (group.column(i) for i in range(group.num_columns))
                inside = (c for c in columns if c.path_in_schema.split(".")[0] == name)
                yield group.num_rows, sum(column.num_values for column in inside)

        def columns(group: int, name: str, rows: int) -> Iterator[Any]:
            if rows >= groups[group].num_rows:
                found = opened.read_row_group(group, columns=[name], use_threads=False)
                yield found.column(0).combine_chunks()
                return
            for batch in opened.iter_batches(rows, [group], columns=[name], use_threads=False):
                yield batch.column(0)

        return _Table(opened.schema_arrow, sizes, columns)
    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    source = pyarrow.memory_map(str(path))
    table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()
    chunks = table.to_batches()

    def slices(group: int, name: str, rows: int) -> Iterator[Any]:
        column = chunks[group].column(name)
        yield from (column.slice(i, rows) for i in range(0, max(len(column), 1), rows or 1))

    def lengths(name: str) -> Iterator[tuple[int, int]]:
        yield from ((len(chunk), len(chunk.column(name).values)) for chunk in chunks)

    return _Table(table.schema, lengths, slices)


def _blocks(table: _Table, name: str) -> list[_Block]:
    """Return the blocks of a column, of about BLOCK_TOKENS at most."""
    found = list[_Block]()
    for group, (rows, tokens) in enumerate(table.sizes(name)):
        each = max(-(-rows // max(-(-tokens // BLOCK_TOKENS), 1)), 1)
        for number, first in enumerate(range(0, max(rows, 1), each)):
            found.append(_Block(group, number, min(each, rows - first)))
    return found


def _column_of(schema: Any) -> str:
    """Return the column of a table that has tokens; "" if there is none."""
    for name in COLUMNS:
        if name in schema.names:
            kind = str(getattr(schema.field(name).type, "value_type", ""))
            if re.fullmatch(r"u?int\d+", kind):
                return name
    return ""


def find_table(path: Path) -> Path | None:
    """Return a path if it is a Parquet or Arrow file with a column of tokens; None otherwise.

    Raises:   ConfigError for a damaged file.
    """
    is_table = path.suffix in (".parquet", ".arrow") and path.is_file()
    return path if is_table and TableRows(path).column else None


def read_table(path: Path, hints: Hints) -> TokenFile | None:
    """Open a Parquet or Arrow file. None: it has no tokens. Raises:   ConfigError."""
    return open_rows(TableRows(path), cached=True)
