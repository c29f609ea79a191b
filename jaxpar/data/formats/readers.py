"""Readers of each file format, which yield pieces of documents in bounded memory.

Text is returned exactly as stored, including newlines. Unreadable input raises a `ConfigError` that
names the file and the line.
"""

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxpar.config import ConfigError

#: Maximum characters passed to a tokenizer at once. Limits the memory, not the documents.
PIECE_CHARS = 1 << 20

#: Compressed bytes to read at a time.
READ_BYTES = 1 << 20

#: Maximum bytes of a line of JSON Lines, and characters of a document that is in memory at once: a
#: value of a table, or a text between separators. A small compressed file can contain a line of
#: gigabytes.
MAX_LINE_BYTES = MAX_DOCUMENT_CHARS = 1 << 26


#: What a record is: UTF-8 text, a JSON object, or a row of a table.
TEXT, JSON_OBJECT, ROW = range(3)


class Record(NamedTuple):
    """The place in a file where a text is stored."""

    kind: int
    """TEXT, JSON_OBJECT or ROW."""
    start: int
    """First byte, in the decompressed file; for a table, the number of the row."""
    size: int
    """Bytes; 0 for a row."""


class Piece(NamedTuple):
    """Part of a document's text, or all of it up to PIECE_CHARS."""

    text: str
    last: bool
    """Whether the document ends here."""
    position: int
    """Bytes of input read so far, for a progress bar."""
    record: Record
    """Where to find the text again (`jaxpar/data/stream`)."""
    first: int = 0
    """Characters of the record's text before this piece."""
    file: int = 0
    """Number of the file among all."""


@dataclass(frozen=True)
class ReadOptions:
    """How documents are stored in files."""

    text_field: str = "text"
    """JSON field or Parquet column of the text."""
    separator: str | None = None
    """Text between documents inside a .txt file, its newlines \\n or \\r\\n in the file. None: a
    file is a document."""


def read_text(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of a UTF-8 text file."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    chunks = iter(lambda: text.read(PIECE_CHARS), "")
    try:
        if options.separator is None:
            yield from in_bytes(cut(chunks, file.tell, Record(TEXT, 0, 0)))
        else:
            for document, start in _separated(chunks, options.separator, path):
                yield from in_bytes(cut([document], file.tell, Record(TEXT, start, 0)))
    except UnicodeDecodeError as error:
        line = _first_line_not_utf8(path)
        raise input_error(f"{path}:{line}", "is not UTF-8", "convert the file to UTF-8") from error


def in_bytes(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Give each piece of a document in a text file a record of its own: its bytes."""
    start = None
    for piece in pieces:
        start = piece.record.start if start is None else start
        size = len(piece.text.encode("utf-8"))
        yield piece._replace(record=Record(TEXT, start, size), first=0)
        start += size


def read_jsonl(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of a JSON Lines file, which may be compressed, by its name."""
    field = options.text_field
    for where, value, record in _located_records(file, path):
        yield from cut([json_text(value, field, where)], file.tell, record)


def json_text(value: Any, field: str, where: str) -> str:
    """Return the text in a field of an object. Raises: ConfigError if there is none."""
    if not isinstance(value, dict) or field not in value:
        rule = f"is not a JSON object with the field {field!r}"
        raise input_error(where, rule, "set the text field with --text-field")
    return valid_text(value[field], where, f"field {field!r}")


def json_records(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON Lines file with their places; blank lines are skipped."""
    return ((where, value) for where, value, _ in _located_records(file, path))


def _located_records(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any, Record]]:
    end = 0
    for number, line in enumerate(json_lines(file, path), start=1):
        start, end = end, end + len(line)
        where = f"{path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            rule = f"is longer than {MAX_LINE_BYTES:,} bytes"
            raise input_error(where, rule, "remove the line, or split its document")
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            fix = "repair or remove the line"
            raise input_error(where, f"is not valid JSON ({error})", fix) from error
        yield where, value, Record(JSON_OBJECT, start, len(line))


def json_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield lines; if one is longer than MAX_LINE_BYTES, its start with one byte more."""
    kind = path.suffix.lower()
    if kind not in (".gz", ".zst"):
        yield from _bounded(file)
        return
    try:
        if path.stat().st_size == 0:  # which gzip accepts
            raise EOFError("it has 0 bytes, without even a header")
        with gzip.open(file) if kind == ".gz" else _open_zst(file, path) as lines:
            yield from _bounded(lines)
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError) as error:
        name = "gzip" if kind == ".gz" else "zstd"
        rule = f"is not a complete {name} file ({error})"
        raise input_error(str(path), rule, "download or compress it again") from error


def _bounded(lines: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    return iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b"")


def _open_zst(file: BinaryIO, path: Path) -> BinaryIO:
    # pyarrow, unlike most Zstandard readers, detects a truncated file.
    pyarrow = import_pyarrow(path)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(stream, READ_BYTES)


def import_pyarrow(path: Path) -> Any:
    """Import pyarrow, which takes half a second and is an optional package.

    Raises:   ConfigError if it is not installed.
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
    """Return the value if it is text that can be encoded as UTF-8; otherwise raise ConfigError."""
    if not isinstance(value, str):
        rule = f"{what} must be text, not {type(value).__name__}"
        raise input_error(where, rule, fix)
    if len(value) > MAX_DOCUMENT_CHARS:
        rule = f"{what} is longer than {MAX_DOCUMENT_CHARS:,} characters"
        raise input_error(where, rule, "split the document, or remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can contain half of a surrogate pair, which is not a character.
        raise input_error(
            where, f"{what} is not Unicode ({error})", "repair or remove it"
        ) from error
    return value


def _separated(chunks: Iterable[str], separator: str, path: Path) -> Iterator[tuple[str, int]]:
    """Yield documents, each with the byte of the file where it starts."""
    either = re.compile("(" + r"\r?\n".join(map(re.escape, separator.split("\n"))) + ")")
    rest, start = "", 0
    for chunk in chunks:
        text = rest + chunk
        if "\r" in text:  # documents and the separators between them take turns
            *found, rest = either.split(text)
            pairs = list(zip(found[::2], found[1::2], strict=True))
        else:  # several times as fast
            *found, rest = text.split(separator)
            pairs = [(document, separator) for document in found]
        for document, mark in pairs:
            yield document, start
            start += len((document + mark).encode("utf-8"))
        if len(rest) > MAX_DOCUMENT_CHARS:
            rule = f"no {separator!r} within {MAX_DOCUMENT_CHARS:,} characters"
            fix = "use a --separator that occurs in the file, or none"
            raise input_error(str(path), rule, fix)
    yield rest, start


def cut(chunks: Iterable[str], tell: Callable[[], int], record: Record) -> Iterator[Piece]:
    """Yield one document, the text of a record, as pieces, split at line ends if possible."""
    rest, before = "", 0
    for chunk in chunks:
        rest, start = rest + chunk, 0
        while len(rest) - start > PIECE_CHARS:
            line_end = rest.rfind("\n", start, start + PIECE_CHARS) + 1
            end = line_end or start + PIECE_CHARS
            yield Piece(rest[start:end], False, tell(), record, before)
            before += end - start
            start = end
        rest = rest[start:]
    yield Piece(rest, True, tell(), record, before)


def _first_line_not_utf8(path: Path) -> int:
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        for chunk in itertools.chain(iter(lambda: file.read(READ_BYTES), b""), [b""]):
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return line + error.object.count(b"\n", 0, error.start)
            line += chunk.count(b"\n")
    raise AssertionError(f"{path} changed while it was read")


def input_error(where: str, rule: str, fix: str) -> ConfigError:
    """Return the error for a place in an input file."""
    return ConfigError("--input", where, rule, fix)
