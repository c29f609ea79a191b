"""Parquet and Arrow files with a column of lists of tokens."""

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

#: Tokens of a block, which are decoded at once. More is refused. Row groups of `datasets` have at
#: most 100 MB.
BLOCK_TOKENS = 32 << 20


class TableRows(RowReader):
    """A column of lists: in Parquet by row groups, in Arrow by batches. Opened for each block."""

    def __init__(self, path: Path):
        """Raises:   ConfigError for a damaged file."""
        self.path = path
        with self._opened() as table:
            #: Its name; "" if the file has no tokens.
            self.num_blocks, self.column = table.num_blocks, _column_of(table.schema)

    def read(self, block: int) -> list[np.ndarray]:
        """Return the rows of a block."""
        where = f"{self.path}, block {block}"
        pyarrow = import_pyarrow(self.path)
        with self._opened() as table:
            if table.num_tokens(block, self.column) > BLOCK_TOKENS:
                rule = f"has {table.num_tokens(block, self.column):,} tokens in one row group"
                raise broken(where, rule, "write it again with row_group_size=1000")
            column = table.column(block, self.column)
            column.validate(full=True)  # Arrow would read other memory of a damaged file
            values = column.flatten()
            if column.null_count or values.null_count:
                raise broken(where, "has a null among its tokens", "write it without nulls")
            lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
            row = as_tokens(values.to_numpy(zero_copy_only=False), where)
        return np.split(row, np.cumsum(lengths)[:-1])

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
    num_blocks: int
    num_tokens: Callable[[int, str], int]
    """Values of a column in a block."""
    column: Callable[[int, str], Any]
    """Column of a block, an array of lists."""


def _open_table(pyarrow: Any, file: BinaryIO, path: Path) -> _Table:
    if path.suffix == ".parquet":
        opened = pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
        about = opened.metadata

        def num_tokens(block: int, name: str) -> int:
            columns = (about.row_group(block).column(i) for i in range(about.num_columns))
            inside = (c for c in columns if c.path_in_schema.split(".")[0] == name)
            return int(sum(column.num_values for column in inside))

        def column(block: int, name: str) -> Any:
            group = opened.read_row_group(block, columns=[name], use_threads=False)
            return group.column(0).combine_chunks()

        return _Table(opened.schema_arrow, opened.num_row_groups, num_tokens, column)
    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    source = pyarrow.memory_map(str(path))
    table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()
    chunks = table.to_batches()

    def batch(block: int, name: str) -> Any:
        return chunks[block].column(name)

    return _Table(table.schema, len(chunks), lambda i, name: len(batch(i, name).values), batch)


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
