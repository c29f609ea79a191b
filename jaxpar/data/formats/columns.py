"""Readers of columns: Parquet and Arrow files, and which files a Hugging Face folder means."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.data.formats.readers import (
    READ_BYTES,
    Piece,
    ReadOptions,
    cut,
    import_pyarrow,
    input_error,
    valid_text,
)

#: Rows read from Parquet at a time.
BATCH_ROWS = 256

#: How an Arrow IPC file begins; a stream begins with a message instead.
ARROW_FILE = b"ARROW1"

#: How a stream ends. Readers take one that was cut between batches for a whole one.
STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

#: What `datasets.save_to_disk` writes beside its shards, and above its splits.
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"


def read_parquet(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """The documents of a Parquet file: one column of strings, read in small batches of rows."""
    pyarrow, field = import_pyarrow(path), options.text_field

    def batches() -> Iterator[Any]:
        # By default, all of a row group is read at once, and it may be all of the file.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
        _check_column(table.schema_arrow.names, path, field)
        yield from table.iter_batches(batch_size=BATCH_ROWS, columns=[field])

    yield from _rows(batches, "Parquet", pyarrow, path, field, file.tell)


def read_arrow(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """The documents of an Arrow IPC file or stream: one column of strings, batch by batch."""
    pyarrow, field = import_pyarrow(path), options.text_field
    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    if not is_file:
        _check_stream_end(file, path)
    file.seek(0)

    def batches() -> Iterator[Any]:
        reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        _check_column(reader.schema.names, path, field)
        if not is_file:
            yield from (batch.select([field]) for batch in reader)
            return
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i).select([field])

    yield from _rows(batches, "Arrow", pyarrow, path, field, file.tell)


def _check_stream_end(file: BinaryIO, path: Path) -> None:
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - len(STREAM_END)))
    if file.read() != STREAM_END:
        rule = "is not readable Arrow (no end of stream: cut off, or still being written)"
        raise input_error(f"{path}, byte {size:,}", rule, "copy or write it again")


def _rows(
    batches: Callable[[], Iterator[Any]],
    kind: str,
    pyarrow: Any,
    path: Path,
    field: str,
    tell: Callable[[], int],
) -> Iterator[Piece]:
    row = 0
    try:
        for batch in batches():
            for value in batch.column(0):
                row += 1
                text = valid_text(value.as_py(), f"{path}, row {row}", f"column {field!r}")
                yield from cut([text], tell)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        where, reason = f"{path}, after row {row}", " ".join(str(error).split())
        raise input_error(where, f"is not readable {kind} ({reason})", "write it again") from error


def _check_column(columns: Sequence[str], path: Path, field: str) -> None:
    if field not in columns:
        rule = f"has no column {field!r}, only {', '.join(columns)}"
        raise input_error(str(path), rule, "name the column of text with --text-field")


def saved_shards(folder: Path) -> list[Path] | None:
    """The shards of a folder that `datasets.save_to_disk` wrote, in order; None if it is no such.

    What else lies there, such as the library's caches, is not part of the data.

    Raises:   ConfigError for a folder of several splits, a damaged state.json, a missing shard.
    """
    if (folder / SPLITS_FILE).is_file():
        splits = sorted(inner.parent.name for inner in folder.glob(f"*/{STATE_FILE}"))
        rule = f"is a dataset of splits: {', '.join(splits)}"
        split = splits[0] if splits and "train" not in splits else "train"
        raise input_error(str(folder), rule, f"name one, such as {folder / split}")
    state = folder / STATE_FILE
    if not state.is_file():
        return None
    try:
        names = [part["filename"] for part in json.loads(state.read_text("utf-8"))["_data_files"]]
        shards = [folder / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"is not what `datasets.save_to_disk` writes ({error!r})"
        raise input_error(str(state), rule, "save the dataset again") from error
    for shard in shards:
        if not shard.is_file():
            raise input_error(
                str(shard), f"is missing, and {state} names it", "copy the folder again"
            )
    return shards
