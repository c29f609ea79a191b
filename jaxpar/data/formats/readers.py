"""One reader per file format: an open file in, pieces of documents out, in bounded memory.

Text comes out exactly as it is stored, newlines included. Whatever cannot be read is a
`ConfigError` that names the file and the line.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxpar.config import ConfigError

#: Longest text handed to a tokenizer at once, in characters: bounds memory, not documents.
PIECE_CHARS = 1 << 20

#: Compressed bytes asked for at a time.
READ_BYTES = 1 << 20

#: Longest .txt document that is looked through for a separator, in characters.
MAX_SEPARATED_CHARS = 1 << 28


class Piece(NamedTuple):
    """Part of a document's text: all of it, unless it is longer than PIECE_CHARS."""

    text: str
    last: bool
    """Whether the document ends here."""
    position: int
    """Bytes of input read so far, for a progress bar."""


@dataclass(frozen=True)
class ReadOptions:
    """How files hold their documents."""

    text_field: str = "text"
    """JSON field, or Parquet column, that holds the text."""
    separator: str | None = None
    """Text between documents inside a .txt file, its newlines \\n or \\r\\n in the file. None: a
    file is a document."""


def read_text(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """The documents of a UTF-8 text file."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    chunks = iter(lambda: text.read(PIECE_CHARS), "")
    try:
        if options.separator is None:
            yield from cut(chunks, file.tell)
        else:
            for document in _separated(chunks, options.separator, path):
                yield from cut([document], file.tell)
    except UnicodeDecodeError as error:
        line = _first_line_not_utf8(path)
        raise input_error(f"{path}:{line}", "is not UTF-8", "convert the file to UTF-8") from error


def read_jsonl(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """The documents of a JSON Lines file, compressed or not, by its name."""
    field = options.text_field
    for where, record in json_records(file, path):
        if not isinstance(record, dict) or field not in record:
            rule = f"is not a JSON object with the field {field!r}"
            raise input_error(where, rule, "name the field of text with --text-field")
        yield from cut([valid_text(record[field], where, f"field {field!r}")], file.tell)


def json_records(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON Lines file, each with its place; blank lines are allowed."""
    for number, line in enumerate(_lines(file, path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            fix = "repair or remove the line"
            raise input_error(where, f"is not a line of JSON ({error})", fix) from error
        yield where, record


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    kind = path.suffix.lower()
    if kind not in (".gz", ".zst"):
        yield from file
        return
    try:
        if path.stat().st_size == 0:  # gzip takes it for a whole file of nothing
            raise EOFError("it has 0 bytes, and one of no lines has a header")
        with gzip.open(file) if kind == ".gz" else _open_zst(file, path) as lines:
            yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError) as error:
        name = "gzip" if kind == ".gz" else "zstd"
        rule = f"is not a whole {name} file ({error})"
        raise input_error(str(path), rule, "download or compress it again") from error


def _open_zst(file: BinaryIO, path: Path) -> BinaryIO:
    # pyarrow, unlike most readers of Zstandard, tells a cut file from one that ends.
    pyarrow = import_pyarrow(path)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(stream, READ_BYTES)


def import_pyarrow(path: Path) -> Any:
    """pyarrow, which takes half a second to import and is an extra.

    Raises:   ConfigError when it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        fix = "run pip install pyarrow"
        raise input_error(str(path), "needs pyarrow, which is not installed", fix) from error
    return pyarrow


def valid_text(
    value: Any, where: str, what: str, fix: str = "remove it, or use --text-field"
) -> str:
    """The value, if it is text that can be written as UTF-8; otherwise raises ConfigError."""
    if not isinstance(value, str):
        rule = f"{what} must be text, not {type(value).__name__}"
        raise input_error(where, rule, fix)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is no character.
        raise input_error(
            where, f"{what} is not Unicode ({error})", "repair or remove it"
        ) from error
    return value


def _separated(chunks: Iterable[str], separator: str, path: Path) -> Iterator[str]:
    either = re.compile(r"\r?\n".join(map(re.escape, separator.split("\n"))))
    rest = ""
    for chunk in chunks:
        text = rest + chunk
        # `str.split` is several times as fast, and finds the same where there is no \r.
        *documents, rest = either.split(text) if "\r" in text else text.split(separator)
        yield from documents
        if len(rest) > MAX_SEPARATED_CHARS:
            rule = f"no {separator!r} within {MAX_SEPARATED_CHARS:,} characters"
            fix = "use a --separator that the file holds, or none"
            raise input_error(str(path), rule, fix)
    yield rest


def cut(chunks: Iterable[str], tell: Callable[[], int]) -> Iterator[Piece]:
    """One document as pieces, each cut after a line where there is one to cut after."""
    rest = ""
    for chunk in chunks:
        rest, start = rest + chunk, 0
        while len(rest) - start > PIECE_CHARS:
            line_end = rest.rfind("\n", start, start + PIECE_CHARS) + 1
            end = line_end or start + PIECE_CHARS
            yield Piece(rest[start:end], last=False, position=tell())
            start = end
        rest = rest[start:]
    yield Piece(rest, last=True, position=tell())


def _first_line_not_utf8(path: Path) -> int:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{path} changed while it was read")


def input_error(where: str, rule: str, fix: str) -> ConfigError:
    """The error for a place in an input file."""
    return ConfigError("--input", where, rule, fix)
