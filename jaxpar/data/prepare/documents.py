"""Find input files and read their documents, in a fixed order."""

import bisect
import codecs
import dataclasses
import itertools
import json
import re
import shlex
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats import columns, readers
from jaxpar.data.formats.compressed import (
    COMPRESSIONS,
    FileSpan,
    Kinds,
    compression,
    decompressed,
    reading,
)
from jaxpar.data.formats.json_file import has_lines, only_object
from jaxpar.data.formats.readers import Piece, ReadOptions
from jaxpar.data.formats.tar_file import read_tar
from jaxpar.data.prepare.remote import files_of, is_remote
from jaxpar.runtime.units import size

# ---------------------------------------------- What to do about files that `prepare` does not read


#: Bytes of a file to look at.
LOOKED_AT = 1 << 16

#: Endings of text that is a table, a page or an archive: as raw text, a model would learn its
#: syntax.
CONVERTED = (".csv", ".tsv", ".xml", ".html", ".htm", ".pdf", ".zip", ".tar", ".parquet", ".arrow")


def is_text(path: Path) -> bool:
    """Return whether the option --extension reads a file as text that is worth it."""
    ending = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if ending in COMPRESSIONS else ending
    begin = _begin(path)
    return bool(
        ending
        and inner not in CONVERTED
        and begin
        and not _is_json(begin)
        and _begins_as_utf8(begin)
    )


def advice(path: Path, kinds: str, has_extension: bool) -> str:
    """Return how to read a file whose name does not say what it is.

    Args:     kinds: the endings that can be read. has_extension: whether the command has the option
              --extension.
    """
    name, begin = path.name, _begin(path)
    compressed = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    stem = name.removesuffix(path.suffix)
    if name.lower().endswith((".tar" + compressed, ".tgz")) and name.lower() != ".tar":
        return "decompress it first: a tar file is read uncompressed"
    if begin is not None and _is_json(begin):
        new = path.with_name(f"{stem}.jsonl{compressed}")
        return f"rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}"
    if has_extension and is_text(path):
        return f"convert it to one of {kinds}, or read it as text with --extension {path.suffix}"
    return f"convert it to one of {kinds}"


def _begin(path: Path) -> bytes | None:
    """Return the first bytes of a file, decompressed; None if they cannot be read."""
    try:
        with path.open("rb") as file, decompressed(file, path) as content:
            return content.read(LOOKED_AT)
    except (OSError, ValueError):
        return None


def _begins_as_utf8(begin: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(begin, final=False)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _is_json(begin: bytes) -> bool:
    """Return whether a file begins as JSON: an object or array in a line, or an indented one."""
    lines = (line.strip() for line in begin.splitlines())
    first, second = itertools.islice((*[line for line in lines if line][:2], b"", b""), 2)
    if first in (b"{", b"[", b"[{"):
        return second[:1] in (b'"', b"{", b"[", b"")
    if first[:1] not in (b"{", b"["):
        return False
    try:
        json.loads(first)
    except RecursionError:
        return True
    except ValueError:
        return len(first) >= LOOKED_AT - 1  # a line that is longer
    return True


#: The `--input` for the source code of the Python standard library, which is always available.
STDLIB = "stdlib"

Reader = Callable[[BinaryIO, Path, ReadOptions], Iterator[Piece]]

#: The endings of JSON Lines, each also compressed. Published corpora use all of them.
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")


def _compressed(endings: Sequence[str], read: Reader) -> dict[str, Reader]:
    return {end + more: read for end in endings for more in ("", *COMPRESSIONS)}


#: The readers of JSON files, by the ending of the name.
JSON_READERS = _compressed(JSON_ENDINGS, readers.read_jsonl)

#: The reader of each kind of file.
READERS: dict[str, Reader] = {
    **_compressed([".txt"], readers.read_text),
    **JSON_READERS,
    ".parquet": columns.read_parquet,
    ".arrow": columns.read_arrow,
    ".tar": read_tar,
}

#: The kinds, for errors.
KINDS = ", ".join(dict.fromkeys(end for end in READERS if not end.endswith(tuple(COMPRESSIONS))))

#: The `--extension` for every file that is UTF-8 text.
ANY = "any"


class InputFile(NamedTuple):
    """One input file."""

    path: Path
    read: Reader
    num_bytes: int
    """Size of the file, compressed or not."""
    span: FileSpan | None = None
    """The part of it to read. None: all."""

    def part(self, start: int, end: int) -> "InputFile":
        """Return the lines, or row groups, that begin in these bytes."""
        if (start, end) == (0, self.num_bytes):
            return self
        return self._replace(num_bytes=end - start, span=FileSpan(start, end))

    def places(self) -> Sequence[int]:
        """Return the bytes where it can be cut, sorted. Reads a line, or a Parquet footer."""
        if self.read is columns.read_parquet:
            return columns.row_group_starts(self.path)
        lines = self.read is readers.read_jsonl and not compression(self.path)
        return range(self.num_bytes) if lines and has_lines(self.path) else ()


def cut_files(files: Sequence[InputFile], count: int) -> list[list[InputFile]]:
    """Cut files into parts of about equal bytes, in order.

    Files are cut between lines of JSON, or row groups of Parquet, as near to the share of a part as
    they can be; other files are in one part. Only files that are cut are opened.
    """
    parts: list[list[InputFile]] = [[] for _ in range(count)]
    number, left = 0, sum(file.num_bytes for file in files)
    room = -(-left // count)
    for at, file in enumerate(files):
        start, end, places = 0, file.num_bytes, None
        while end - start > room and number < count - 1:
            wanted, places = start + room, file.places() if places is None else places
            after = bisect.bisect_left(places, wanted)
            choices = [p for p in places[max(after - 1, 0) : after + 1] if start < p < end] + [end]
            if parts[number]:
                whole = not places and len(files) - at < count - number  # a part for each
                choices = [start] if whole else [start, *choices]
            cut = min((abs(place - wanted), place) for place in choices)[1]
            if cut > start:
                parts[number].append(file.part(start, cut))
            left, start, number = left - (cut - start), cut, number + 1
            room = -(-left // (count - number))
        if start < end or not end:
            parts[number].append(file.part(start, end))
            left, room = left - (end - start), room - (end - start)
    return parts


class Wanted(NamedTuple):
    """The files to read in folders."""

    extensions: tuple[str, ...] = ()
    """The endings of their names, such as ".py", or ANY. Files without a reader of their own are
    text. Empty: all files with a reader."""
    fields: tuple[str, ...] = ("text",)
    """The fields of documents, for which a .json of a single object must have one."""
    json_only: bool = False
    """Whether only JSON is read."""
    by_name: bool = False
    """Whether the command has no option --extension, so that files to read are named."""

    def reader(self, path: Path) -> Reader | None:
        """Return the reader of a file; None if it is not wanted."""
        name = path.name.lower()
        known = JSON_READERS if self.json_only else READERS
        own = next((read for end, read in known.items() if name.endswith(end)), None)
        if not self.extensions:
            return own
        fits = ANY in self.extensions or name.endswith(self.extensions)
        return own or readers.read_text if fits else None

    @property
    def kinds(self) -> str:
        """The endings of the files, for errors."""
        if ANY in self.extensions:
            return "text"
        json_kinds = ", ".join(JSON_ENDINGS)
        return ", ".join(self.extensions) or (json_kinds if self.json_only else KINDS)


def find_sources(
    inputs: Sequence[str], wanted: Wanted | None = None, log: Callable[[str], None] | None = None
) -> list[InputFile]:
    """Find the files of all inputs, in the given order; those of a folder are sorted by path.

    Args:     inputs: files, folders (searched recursively), or "stdlib". wanted: the files to read
              in folders. log: called with a line about the files of a folder that are not read.
    Raises:   ConfigError for an input that is missing, has an unknown format, or has no documents;
              for a folder most of whose bytes would not be read; and for what is no ending.
    """
    if not inputs:
        raise ConfigError("--input", "", "must not be empty", f"use --input {STDLIB}")
    wanted = wanted or Wanted()
    wanted = wanted._replace(extensions=tuple(map(_ending, wanted.extensions)))
    sources: list[InputFile] = []
    for name in inputs:
        path = Path(name)
        with reading(path):
            if name == STDLIB:
                sources += _stdlib_sources(log or _silent)
            elif is_remote(name):
                sources += _Folder(*files_of(name), wanted).sources(log or _silent)
            elif path.is_file():
                sources.append(_file(path, wanted))
            elif path.is_dir():
                sources += _Folder(path, None, wanted).sources(log or _silent)
            else:
                rule = "is neither a file nor a folder" if path.exists() else "does not exist"
                fix = f"use a file, a folder, or {STDLIB} for the source code of Python"
                if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.exists():
                    fix = f"correct the path; for a dataset of the Hugging Face Hub, hf:{name}"
                raise ConfigError("--input", name, rule, fix)
    return sources


def _silent(line: str) -> None:
    """Show nothing."""


def _ending(given: str) -> str:
    """Return an ending as files have it. Raises: ConfigError for what is none."""
    ending = ANY if given == ANY else f".{given.removeprefix('.')}".lower()
    if ending == "." or "/" in given:
        rule, fix = "is not the ending of a file's name", f"use --extension .py .md, or {ANY}"
        raise ConfigError("--extension", given, rule, fix)
    return ending


def read_pieces(sources: Sequence[InputFile], options: ReadOptions) -> Iterator[Piece]:
    """Read all documents of the sources in order, as pieces of bounded length.

    Returns:  pieces whose `position` counts the bytes of all sources; `file` is their number.
    Raises:   ConfigError that names an unreadable file and line.
    """
    before = 0
    for number, (path, read, num_bytes, span) in enumerate(sources):
        options = dataclasses.replace(options, span=span)
        start = span.start if span else 0
        with reading(path), path.open("rb") as file:
            for piece in read(file, path, options):
                options.rows.num_good += piece.last
                yield piece._replace(position=before + piece.position - start, file=number)
        before += num_bytes


def _file(path: Path, wanted: Wanted) -> InputFile:
    """Return the source of a file that is named. Raises: ConfigError if it has no reader."""
    read = wanted.reader(path)
    if read is None:
        fix = advice(path, wanted.kinds, not wanted.by_name)
        raise ConfigError("--input", str(path), f"is not one of {wanted.kinds}", fix)
    return InputFile(path, read, path.stat().st_size)


class _Folder:
    """The files below a folder: those that are read, and counts of the others."""

    def __init__(self, folder: Path, files: Sequence[Path] | None, wanted: Wanted):
        """Args:     files: below the folder. None: all of them."""
        self._folder, self._wanted = folder, wanted
        self._sources: list[InputFile] = []
        #: Files that may be data, and others: hidden ones, and caches of a saved dataset.
        self._left_out, self._others = Kinds(), Kinds()
        self._unread: dict[str, Path] = {}
        for file in files or ():
            self._add(file)
        if files is None:
            self._walk(folder, frozenset())

    def sources(self, log: Callable[[str], None]) -> list[InputFile]:
        """Return the files to read. Raises: ConfigError if they are none, or the lesser part."""
        if not self._sources:
            raise self._nothing()
        num_bytes = sum(source.num_bytes for source in self._sources)
        if self._left_out.num_bytes > num_bytes and not self._wanted.extensions:
            count = len(self._sources)
            rule = f"has files that are not read, {self._left_out}, and only {count:,} that are, "
            raise ConfigError("--input", str(self._folder), rule + size(num_bytes), self._fix())
        read = Kinds()
        for source in self._sources:
            read.add(kind_of(source.path), source.num_bytes)
        if len(read.counts) > 1 or self._left_out:
            log(f"{self._folder}: files to read: {read}")
        for left_out, which in (
            (self._left_out, ""),
            (self._others, ", hidden, a cache or no file"),
        ):
            if left_out:
                log(f"{self._folder}: files not read{which}: {left_out}")
        return self._sources

    def _walk(self, folder: Path, above: frozenset[Path]) -> None:
        """Add the files below a folder, sorted, following links; for a saved Hugging Face dataset,
        its shards in order.

        Args:     above: the parent folders, to detect loops of links.
        Raises:   ConfigError for a broken link to a file of a known format.
        """
        shards = columns.saved_shards(folder)
        if shards is not None:
            for path in shards:
                self._add(path)
            for path in sorted(set(folder.rglob("*")) - set(shards)):
                if path.is_file() and path.name not in columns.ABOUT_FILES:
                    self._others.add(kind_of(path), path.stat().st_size)
            return
        above |= {folder.resolve()}
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                if path.resolve() not in above:
                    self._walk(path, above)
            elif path.is_file():
                self._add(path)
            elif path.is_symlink() and self._wanted.reader(path):
                fix = "restore its target, or remove the link"
                raise ConfigError("--input", str(path), "is a link to a missing file", fix)
            else:
                self._others.add("link or device", 0)

    def _add(self, path: Path) -> None:
        num_bytes, kind = path.stat().st_size, kind_of(path)
        if any(part.startswith(".") for part in path.relative_to(self._folder).parts):
            self._others.add(kind, num_bytes)
            return
        read = self._wanted.reader(path)
        if read is readers.read_text and ANY in self._wanted.extensions and not _is_utf8(path):
            read = None
        if read is readers.read_jsonl and kind.split(".")[1] == "json":
            value = only_object(path)
            if value is not None and not any(field in value for field in self._wanted.fields):
                read, kind = None, f"{kind} without {self._wanted.fields[0]!r}"
        if read is None:
            self._left_out.add(kind, num_bytes)
            self._unread.setdefault(kind, path)
        else:
            self._sources.append(InputFile(path, read, num_bytes))

    def _nothing(self) -> ConfigError:
        rule = f"has no {self._wanted.kinds} file"
        fix = "use another folder"
        if self._left_out:
            rule += f", but {self._left_out}"
            fix = self._fix()
        return ConfigError("--input", str(self._folder), rule, fix)

    def _fix(self) -> str:
        """Return how to read the other files too, or to leave them out."""
        read = sorted({kind_of(source.path) for source in self._sources})
        if self._wanted.by_name:
            names = {str(s.path.parent / f"*{kind_of(s.path)}") for s in self._sources}
            found = " ".join(sorted(names)[:4])
            named = f"name the files to read: --input {found}"
            return named if read else f"use JSON Lines with the field {self._wanted.fields[0]!r}"
        texts = {kind for kind, path in self._unread.items() if is_text(path)}
        fixes = []
        if texts:
            both = " ".join(map(shlex.quote, sorted({*read, *texts})))
            fixes.append(f"read them as text with --extension {both}")
        if read:
            fixes.append(f"leave them out with --extension {' '.join(map(shlex.quote, read))}")
        if any(" without " in kind for kind in self._unread):
            fixes.append("set the field of a document with --text-field")
        largest = max(self._unread, key=lambda kind: self._left_out.sizes[kind])
        return ", or ".join(fixes) or advice(self._unread[largest], self._wanted.kinds, True)


def kind_of(path: Path) -> str:
    """Return the ending of a file's name, with that before a compression."""
    name = path.name.lower()
    known = next((end for end in READERS if name.endswith(end)), "")
    inner = Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return known or inner + path.suffix.lower() or "without an ending"


def _stdlib_sources(log: Callable[[str], None]) -> list[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    sources, left_out = [], Kinds()
    for path in sorted(root.rglob("*.py")):
        if installed & set(path.parts):
            continue
        num_bytes = path.stat().st_size
        # Python's tests have files in other encodings, on purpose.
        if _is_utf8(path):
            sources.append(InputFile(path, readers.read_text, num_bytes))
        else:
            left_out.add("in other encodings", num_bytes)
    if not sources:
        fix = "use a Python that is not zipped, or another --input"
        raise ConfigError("--input", STDLIB, f"found no .py file below {root}", fix)
    if left_out:
        log(f"{STDLIB}: files not read: {left_out}")
    return sources


def _is_utf8(path: Path) -> bool:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return "\0" not in text
