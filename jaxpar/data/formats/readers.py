"""Readers of each file format, which yield pieces of documents in bounded memory.

Text is returned exactly as stored, including newlines. Unreadable input raises a `ConfigError` that
names the file and the line.
"""

import codecs
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpar.data.formats.compressed import (
    MAX_DOCUMENT_CHARS,
    READ_BYTES,
    BadRow,
    FileSpan,
    RowCounts,
    bad_row,
    decompressed,
    input_error,
)
from jaxpar.data.formats.json_file import json_records, json_text

#: Maximum characters passed to a tokenizer at once. Limits the memory, not the documents.
PIECE_CHARS = 1 << 20


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
    partly: bool = False
    """Whether most bytes of a tar file may be members that are not read."""
    rows: RowCounts = field(default_factory=RowCounts)
    """Counts the bad rows, or raises them."""
    span: FileSpan | None = None
    """The part of a file of JSON Lines, or of Parquet, to read. None: all."""


def read_text(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of a UTF-8 text file, which may be compressed, by its name."""
    rows = options.rows
    if rows.skips and options.separator is None:
        # Before the first piece is written: a file is a document, all of it or nothing.
        with path.open("rb") as again, decompressed(again, path) as content:
            line = _first_line_not_utf8(content)
        if line:
            rows.bad(_not_utf8(path, line))
            return
    with decompressed(file, path) as content:
        # Bytes that are not UTF-8 become lone surrogates, and are found in the document.
        text = io.TextIOWrapper(content, "utf-8", errors="surrogateescape", newline="")
        chunks = iter(lambda: text.read(PIECE_CHARS), "")
        if options.separator is None:
            yield from in_bytes(cut(_checked(chunks, path), file.tell, Record(TEXT, 0, 0)))
            return
        line = 1
        for document, start, mark in _separated(chunks, options.separator, path):
            try:
                checked = list(_checked([document], path, line))
            except BadRow as error:
                rows.bad(error)
            else:
                yield from in_bytes(cut(checked, file.tell, Record(TEXT, start, 0)))
            line += document.count("\n") + mark.count("\n")


def _checked(chunks: Iterable[str], path: Path, line: int = 1) -> Iterator[str]:
    """Yield the chunks of a text. Raises: BadRow, with its line, for one that is not UTF-8."""
    for chunk in chunks:
        try:
            chunk.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _not_utf8(path, line + chunk.count("\n", 0, error.start)) from error
        yield chunk
        line += chunk.count("\n")


def _not_utf8(path: Path, line: int) -> BadRow:
    return bad_row(f"{path}:{line}", "is not UTF-8", "convert the file to UTF-8")


def in_bytes(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Give each piece of a document in a text file a record of its own: its bytes."""
    start = None
    for piece in pieces:
        start = piece.record.start if start is None else start
        size = len(piece.text.encode("utf-8"))
        yield piece._replace(record=Record(TEXT, start, size), first=0)
        start += size


def read_jsonl(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of a JSON file, which may be compressed, by its name."""
    for found, value in json_records(file, path, options.rows, options.span):
        record = Record(JSON_OBJECT, found.start, len(found.data))
        try:
            text = json_text(value, options.text_field, found.where)
        except BadRow as error:
            options.rows.bad(error)
        else:
            yield from cut([text], file.tell, record)


def _separated(chunks: Iterable[str], separator: str, path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield documents, each with the byte of the file where it starts, and what ends it."""
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
            yield document, start, mark
            start += len((document + mark).encode("utf-8", "surrogateescape"))
        if len(rest) > MAX_DOCUMENT_CHARS:
            rule = f"no {separator!r} within {MAX_DOCUMENT_CHARS:,} characters"
            fix = "use a --separator that occurs in the file, or none"
            raise input_error(str(path), rule, fix)
    yield rest, start, ""


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


def _first_line_not_utf8(content: BinaryIO) -> int:
    """Return the first line that is not UTF-8, or 0."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    for chunk in itertools.chain(iter(lambda: content.read(READ_BYTES), b""), [b""]):
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return line + error.object.count(b"\n", 0, error.start)
        line += chunk.count(b"\n")
    return 0
