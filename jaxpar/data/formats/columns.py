"""Readers for Parquet and Arrow files, and for folders of Hugging Face datasets."""

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.config.json_reader import read_json_object
from jaxpar.data.formats.compressed import (
    READ_BYTES,
    BadRow,
    bad_row,
    import_pyarrow,
    input_error,
    valid_text,
)
from jaxpar.data.formats.readers import ROW, Piece, ReadOptions, Record, cut

#: RowCounts to read from Parquet at a time.
BATCH_ROWS = 256

#: Start of an Arrow IPC file; a stream starts with a message.
ARROW_FILE = b"ARROW1"

#: End of a stream. Without this check, a stream truncated between batches looks complete.
STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

#: Files that `datasets.save_to_disk` writes next to its shards, and above its splits.
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
ABOUT_FILES = (STATE_FILE, "dataset_info.json")


def read_parquet(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of a Parquet file: a column of strings, in small batches of rows."""
    pyarrow, field, span = import_pyarrow(path), options.text_field, options.span

    def batches() -> Iterator[tuple[int, Any]]:
        # By default, a complete row group is read at once, which may be the complete file.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
        _check_column(table.schema_arrow.names, path, field)
        groups, row = list(range(table.num_row_groups)), 0
        if span is not None:
            starts = [0, *_starts(table.metadata)[1:]]
            groups = [i for i in groups if span.start <= starts[i] < span.end]
            row = sum(table.metadata.row_group(i).num_rows for i in range(min(groups, default=0)))
        for batch in table.iter_batches(BATCH_ROWS, groups, columns=[field]):
            yield row, batch
            row += len(batch)

    yield from _rows(batches, "Parquet", pyarrow, path, options, file.tell)


def row_group_starts(path: Path) -> Sequence[int]:
    """Return the first byte of each row group but the first; none if it cannot be cut there.

    Of a damaged file, too: reading it raises the error.
    """
    pyarrow = import_pyarrow(path)
    try:
        with path.open("rb") as file:
            found = _starts(pyarrow.parquet.read_metadata(file))[1:]
    except (pyarrow.ArrowException, OSError, IndexError):
        return ()
    return found if found == sorted(found) else ()


def _starts(about: Any) -> list[int]:
    return [about.row_group(i).column(0).data_page_offset for i in range(about.num_row_groups)]


def read_arrow(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of an Arrow IPC file or stream: a column of strings, in batches."""
    pyarrow, field = import_pyarrow(path), options.text_field
    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    if not is_file:
        _check_stream_end(file, path)
    file.seek(0)

    def batches() -> Iterator[tuple[int, Any]]:
        reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        _check_column(reader.schema.names, path, field)
        found = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        row = 0
        for batch in found:
            yield row, batch.select([field])
            row += len(batch)

    yield from _rows(batches, "Arrow", pyarrow, path, options, file.tell)


def _check_stream_end(file: BinaryIO, path: Path) -> None:
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - len(STREAM_END)))
    if file.read() != STREAM_END:
        rule = "is not readable Arrow (no end of stream: truncated, or still being written)"
        raise input_error(f"{path}, byte {size:,}", rule, "copy or write it again")


def _rows(
    batches: Callable[[], Iterator[tuple[int, Any]]],
    kind: str,
    pyarrow: Any,
    path: Path,
    options: ReadOptions,
    tell: Callable[[], int],
) -> Iterator[Piece]:
    row = 0
    try:
        for first, batch in batches():
            _check_offsets(batch.column(0), pyarrow)
            for row, value in enumerate(batch.column(0), first + 1):
                try:
                    text = _text(value, f"{path}, row {row}", options.text_field)
                except BadRow as error:
                    options.rows.bad(error)
                else:
                    yield from cut([text], tell, Record(ROW, row - 1, 0))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system, not of the file
            raise
        where, reason = f"{path}, after row {row}", " ".join(str(error).split())
        raise input_error(where, f"is not readable {kind} ({reason})", "write it again") from error


def _check_offsets(column: Any, pyarrow: Any) -> None:
    """Check that values lie in the column: Arrow would read other memory of a damaged file.

    Raises:   ArrowInvalid. Texts that are not UTF-8 are found by row.
    """
    as_bytes = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    kind = as_bytes.get(column.type)
    (column if kind is None else column.view(kind)).validate(full=True)


def _text(value: Any, where: str, field: str) -> str:
    """Return the text of a value of a column. Raises: BadRow."""
    what = f"column {field!r}"
    try:
        return valid_text(value.as_py(), where, what)
    except UnicodeDecodeError as error:
        raise bad_row(where, f"{what} is not UTF-8", "convert it to UTF-8") from error


def _check_column(columns: Sequence[str], path: Path, field: str) -> None:
    if field not in columns:
        rule = f"has no column {field!r}, only {', '.join(columns)}"
        raise input_error(str(path), rule, "set the text column with --text-field")


def saved_shards(folder: Path) -> list[Path] | None:
    """Return the shards of a folder from `datasets.save_to_disk`, in order; None for other folders.

    Other files in the folder, such as the library's caches, are not part of the data.

    Raises:   ConfigError for a folder of several splits, a damaged state.json, a missing shard.
    """
    if (folder / SPLITS_FILE).is_file():
        splits = sorted(inner.parent.name for inner in folder.glob(f"*/{STATE_FILE}"))
        rule = f"is a dataset with several splits: {', '.join(splits)}"
        split = splits[0] if splits and "train" not in splits else "train"
        raise input_error(str(folder), rule, f"use one of them, such as {folder / split}")
    state = folder / STATE_FILE
    if not state.is_file():
        return None
    try:
        names = [part["filename"] for part in read_json_object(state)["_data_files"]]
        shards = [folder / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"is not what `datasets.save_to_disk` writes ({error!r})"
        raise input_error(str(state), rule, "save the dataset again") from error
    for shard in shards:
        if not shard.is_file():
            raise input_error(
                str(shard), f"is missing, but {state} lists it", "copy the folder again"
            )
    return shards
