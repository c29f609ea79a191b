"""Reads JSON files in bounded memory: a value per line, an array of values, or indented values."""

import codecs
import itertools
import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxpar.data.formats.compressed import (
    MAX_LINE_BYTES,
    READ_BYTES,
    SKIP,
    FileSpan,
    RowCounts,
    bad_row,
    decompressed,
    input_error,
    valid_text,
)

#: Spaces of JSON.
_SPACES = re.compile(r"[ \t\r\n]+")


class JsonText(NamedTuple):
    """A JSON value in a file, as text."""

    where: str
    """File and line, for errors."""
    data: bytes
    start: int
    """First byte, in the decompressed file."""


def json_records(
    file: BinaryIO, path: Path, rows: RowCounts, span: FileSpan | None = None
) -> Generator[tuple[JsonText, Any]]:
    """Yield the values of a JSON file with their texts; blank lines are skipped.

    Args:     rows: counts what is no JSON, or raises it. span: the lines to read; None: all.
    Raises:   ConfigError for a file that cannot be read, or a bad row.
    """
    for text in json_texts(file, path, rows, span):
        try:
            value = json.loads(text.data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            rule = f"is not valid JSON ({error})"
            rows.bad(bad_row(text.where, rule, "repair or remove the line"))
            continue
        yield text, value


def json_texts(
    file: BinaryIO, path: Path, rows: RowCounts, span: FileSpan | None = None
) -> Iterator[JsonText]:
    """Yield the texts of the values of a JSON file in order, without parsing lines.

    A file is an array if it begins with "[", has indented values if its first line ends within an
    object, and otherwise has a value per line.

    Raises:   as `json_records`, but lines may be no JSON.
    """
    with decompressed(file, path) as stream:
        lines = _lines(stream, path, rows, span)
        if span is not None:
            yield from lines
            return
        first = next(lines, None)
        if first is None:
            return
        start = first.data.strip()
        # A broken line is not expected to end in a mark after which JSON continues.
        ends_within = start[:1] == b"[" or (start[:1] == b"{" and start[-1:] in b"{[:,")
        if ends_within and not _is_value(start):
            yield from _values(stream, first, path)
            return
        second = next(lines, None)
        if start[:1] == b"[" and second is None:
            yield from _values(stream, first, path)
            return
        yield first
        yield from itertools.chain([] if second is None else [second], lines)


def has_lines(path: Path) -> bool:
    """Return whether a file, uncompressed, has an object in each line, so that it can be cut."""
    with path.open("rb") as file:
        first = next(_lines(file, path, RowCounts(SKIP)), None)
    return first is not None and first.data.lstrip()[:1] == b"{" and _is_value(first.data)


def json_text(value: Any, field: str, where: str) -> str:
    """Return the text in a field of an object. Raises: BadRow if there is none."""
    if not isinstance(value, dict) or field not in value:
        rule = f"is not a JSON object with the field {field!r}"
        raise bad_row(where, rule, "set the text field with --text-field")
    return valid_text(value[field], where, f"field {field!r}")


def only_object(path: Path) -> dict[str, Any] | None:
    """Return the value of a file that holds a single JSON object; None for other files."""
    try:
        with path.open("rb") as file, closing(json_records(file, path, RowCounts())) as records:
            found = list(itertools.islice(records, 2))
    except (ValueError, OSError):  # also a ConfigError: reading the documents will raise it
        return None
    value = found[0][1] if len(found) == 1 else None
    return value if isinstance(value, dict) else None


def _is_value(text: bytes) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return True  # too deep for any reader: a bad line
    except ValueError:
        return False
    return True


def _lines(
    stream: BinaryIO, path: Path, rows: RowCounts, span: FileSpan | None = None
) -> Iterator[JsonText]:
    """Yield the lines that are not blank. The first may be the beginning of a long array."""
    end, first = 0, True
    if span is not None and span.start:
        end = stream.seek(span.start - 1)
        while (line := stream.readline(READ_BYTES)) and not line.endswith(b"\n"):
            end += len(line)
        end += len(line)
    for number in itertools.count(1):
        if span is not None and end >= span.end:
            return
        start, line = end, stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        end += len(line)
        if start == 0:
            start += len(line) - len(line := line.removeprefix(codecs.BOM_UTF8))
        where = f"{path}, byte {start:,}" if span is not None and span.start else f"{path}:{number}"
        text = JsonText(where, line, start)
        if len(line) > MAX_LINE_BYTES and not (first and line.lstrip()[:1] == b"["):
            rule = f"is longer than {MAX_LINE_BYTES:,} bytes"
            rows.bad(bad_row(text.where, rule, "remove the line, or split its document"))
            while line and not line.endswith(b"\n"):
                line = stream.readline(READ_BYTES)
                end += len(line)
        elif line.strip():
            yield text
            first = False


def _values(stream: BinaryIO, first: JsonText, path: Path) -> Iterator[JsonText]:
    """Yield the values of an array, or values one after another, of which each may have lines."""
    text = _Text(stream, first, path)
    if not text.take("["):
        while text.more():
            yield text.value()
        return
    more = not text.take("]")
    while more:
        if not text.more():
            raise text.error("ends within its array")
        yield text.value()
        more = text.take(",")
        if not more and not text.take("]"):
            raise text.error("has no comma or end after an item of its array")
    if text.more():
        raise text.error("has text after its array")


class _Text:
    """The text of a stream, of which only the value at hand is in memory."""

    def __init__(self, stream: BinaryIO, first: JsonText, path: Path):
        self._stream, self._path = stream, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._held, self._at, self._ended = "", 0, False
        self._line, self._start = int(first.where.rpartition(":")[2]), first.start
        self._add(first.data)

    def error(self, rule: str) -> Exception:
        """Return the error for the place that was reached."""
        where = f"{self._path}:{self._line}"
        return input_error(where, rule, "repair it, or write an object per line")

    def more(self) -> bool:
        """Skip spaces. Returns: whether more text follows."""
        while True:
            match = _SPACES.match(self._held, self._at)
            self._move(match.end() if match else self._at)
            if self._at < len(self._held) or self._ended:
                return self._at < len(self._held)
            self._read(READ_BYTES)

    def take(self, mark: str) -> bool:
        """Skip spaces and a mark. Returns: whether it was there."""
        if not (self.more() and self._held[self._at] == mark):
            return False
        self._move(self._at + 1)
        return True

    def value(self) -> JsonText:
        """Return the value that begins here."""
        where, start, decode = f"{self._path}:{self._line}", self._start, json.JSONDecoder()
        while True:
            try:
                _, end = decode.raw_decode(self._held, self._at)
            except ValueError as error:
                why = f"is not valid JSON ({error})"
            except RecursionError as error:
                raise self.error(f"is not valid JSON ({error})") from error
            else:
                if end < len(self._held) or self._ended:
                    data = self._held[self._at : end].encode("utf-8")
                    self._move(end)
                    return JsonText(where, data, start)
                why = ""
            length = len(self._held) - self._at
            if self._ended:
                raise self.error(why)
            if length > MAX_LINE_BYTES:
                raise self.error(f"has a value that is broken, or above {MAX_LINE_BYTES:,} bytes")
            self._read(max(READ_BYTES, length))

    def _move(self, at: int) -> None:
        passed = self._held[self._at : at]
        self._line += passed.count("\n")
        self._start += len(passed.encode("utf-8"))
        self._at = at

    def _read(self, size: int) -> None:
        data = self._stream.read(size)
        self._ended = not data
        self._add(data)

    def _add(self, data: bytes) -> None:
        self._held, self._at = self._held[self._at :], 0
        try:
            self._held += self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.error(f"is not UTF-8 ({error.reason})") from error
