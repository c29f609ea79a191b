"""Rows of files of text: read, counted, refused; and what is compressed, decompressed."""

import bz2
import gzip
import io
import lzma
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

from jaxpar.config import ConfigError
from jaxpar.runtime.units import size

# ----------------------------- Errors of input files and their rows, and counts of what is not read


#: Maximum bytes of a line of JSON Lines, and characters of a document that is in memory at once: a
#: value of a table, or a text between separators. A small compressed file can contain a line of
#: gigabytes.
MAX_LINE_BYTES = MAX_DOCUMENT_CHARS = 1 << 26

#: The values of `--on-bad-row`.
ERROR: Final = "error"
SKIP: Final = "skip"

#: Kinds of files that a line names. The others are summed.
NAMED_KINDS = 6


class BadRow(ConfigError):
    """A row that cannot be a document: `--on-bad-row skip` leaves it out."""


def input_error(where: str, rule: str, fix: str) -> ConfigError:
    """Return the error for a place in an input file that ends the command."""
    return ConfigError("--input", where, rule, fix)


def bad_row(where: str, rule: str, fix: str) -> BadRow:
    """Return the error for a row of an input file."""
    return BadRow("--input", where, rule, f"{fix}; or leave out such rows: --on-bad-row {SKIP}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file or folder that the system does not let this process read.

    Raises:   ConfigError in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        where, why = error.filename or path, error.strerror or error
        fix = "check the file and its permissions"
        raise input_error(str(where), f"cannot be read: {why}", fix) from error


class FileSpan(NamedTuple):
    """Bytes of a file. The lines, or row groups, that begin in it are read."""

    start: int
    end: int


class Kinds:
    """Counts files, or members of archives, by kind."""

    def __init__(self) -> None:
        self.counts, self.sizes = Counter[str](), Counter[str]()

    def add(self, kind: str, num_bytes: int) -> None:
        """Count a file."""
        self.counts[kind] += 1
        self.sizes[kind] += num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self.sizes.total()

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        """Return the kinds, the largest first: "3 .png (1.2 MB), 1 .md (310 bytes)"."""
        kinds = sorted(self.counts, key=lambda kind: (-self.sizes[kind], kind))
        named = kinds[:NAMED_KINDS]
        if others := kinds[NAMED_KINDS:]:
            named.append("of other kinds")
            self.counts[named[-1]] = sum(self.counts[kind] for kind in others)
            self.sizes[named[-1]] = sum(self.sizes[kind] for kind in others)
        return ", ".join(f"{self.counts[k]:,} {k} ({size(self.sizes[k])})" for k in named)


class RowCounts:
    """The rows of an input that are not documents, and the members of archives not read."""

    def __init__(self, on_bad: str = ERROR):
        """Args:     on_bad: ERROR or SKIP."""
        self.skips = on_bad == SKIP
        self.num_good = self.num_bad = self.num_blank = 0
        #: File, line and reason of the first bad row.
        self.first_bad = ""
        #: Members of tar files by the file's path.
        self.members: dict[Path, Kinds] = {}

    def bad(self, error: BadRow) -> None:
        """Count a row that is left out. Raises:   the error, unless such rows are skipped."""
        if not self.skips:
            raise error
        self.first_bad = self.first_bad or f"{error.value} {error.rule}"
        self.num_bad += 1

    def check(self, inputs: str) -> None:
        """Check that not all rows are bad. Raises:   ConfigError, with the first one."""
        if self.num_bad and not self.num_good:
            rule = f"has only bad rows, {self.num_bad:,}; the first: {self.first_bad}"
            fix = "correct the options that name its fields, or use other files"
            raise input_error(inputs, rule, fix)

    def lines(self) -> Iterator[str]:
        """Yield a line about each kind of row that was left out."""
        if self.num_bad:
            yield f"bad rows left out: {self.num_bad:,}; the first: {self.first_bad}"
        if self.num_blank:
            yield f"documents without visible characters left out: {self.num_blank:,}"
        yield from self.left_out()

    def left_out(self) -> Iterator[str]:
        """Yield a line about the members of each tar file that were not read."""
        for path, members in self.members.items():
            if members:
                yield f"{path}: members not read: {members}"


def valid_text(
    value: Any, where: str, what: str, fix: str = "remove it, or use --text-field"
) -> str:
    """Return the value if it is text that can be encoded as UTF-8; otherwise raise BadRow."""
    if not isinstance(value, str):
        raise bad_row(where, f"{what} must be text, not {type(value).__name__}", fix)
    if len(value) > MAX_DOCUMENT_CHARS:
        rule = f"{what} is longer than {MAX_DOCUMENT_CHARS:,} characters"
        raise bad_row(where, rule, "split the document, or remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can contain half of a surrogate pair, which is not a character.
        raise bad_row(where, f"{what} is not Unicode ({error})", "repair or remove it") from error
    return value


# --------------------------------- Opens files that may be compressed, by the ending of their names


#: Compressed bytes to read at a time.
READ_BYTES = 1 << 20

#: The compressions by the last ending of a file's name.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bzip2"}

#: What the libraries raise for damaged files.
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)


def compression(path: Path) -> str:
    """Return the compression of a file, or ""."""
    return COMPRESSIONS.get(path.suffix.lower(), "")


@contextmanager
def decompressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Yield the content of an open file as a stream.

    Raises:   ConfigError, while the content is read, for a file that is damaged or truncated;
              OSError if it cannot be read.
    """
    kind = compression(path)
    if not kind:
        yield file
        return
    try:
        if path.stat().st_size == 0:  # which gzip accepts
            raise EOFError("it has 0 bytes, without even a header")
        with _open(file, kind, path) as stream:
            yield stream
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno:  # of the system, not of a library
            raise
        raise damaged(path, kind, str(error)) from error


def _open(file: BinaryIO, kind: str, path: Path) -> BinaryIO:
    if kind == "zstd":
        # pyarrow, unlike most Zstandard readers, detects a truncated file.
        pyarrow = import_pyarrow(path)
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), kind)
        return cast(BinaryIO, io.BufferedReader(stream, READ_BYTES))
    openers: dict[str, Any] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
    return cast(BinaryIO, openers[kind](file))


def damaged(path: Path, kind: str, why: str) -> ConfigError:
    """Return the error for a compressed file that a library could not read.

    Args:     kind: a value of COMPRESSIONS. why: what the library said.
    """
    if "too much memory" in why:
        # Only files of `zstd --long=28` or more. pyarrow has no option for them.
        stem, dot, ending = path.name.partition(".")
        again = shlex.quote(str(path.with_name(f"{stem}-again{dot}{ending}")))
        command = f"zstd -dc --long=31 {shlex.quote(str(path))} | zstd -q -o {again}"
        rule = "is compressed with a zstd window above 128 MiB, which cannot be read"
        return input_error(str(path), rule, f"compress it again: {command}")
    rule = f"is not a complete {kind} file ({why})"
    return input_error(str(path), rule, "download or compress it again")


def import_pyarrow(path: Path) -> Any:
    """Import pyarrow, which takes half a second and is an optional package.

    Raises:   ConfigError if it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        fix = "run pip install pyarrow"
        raise input_error(str(path), "needs pyarrow, which is not installed", fix) from error
    return pyarrow
