"""Find input files and read their documents, in a fixed order."""

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxpar.config import ConfigError
from jaxpar.data.formats import columns, readers
from jaxpar.data.formats.readers import Piece, ReadOptions
from jaxpar.data.formats.tar_file import read_tar

#: The `--input` for the source code of the Python standard library, which is always available.
STDLIB = "stdlib"

Reader = Callable[[BinaryIO, Path, ReadOptions], Iterator[Piece]]

#: The reader of each kind of file, by the ending of its name.
READERS: dict[str, Reader] = {
    ".txt": readers.read_text,
    ".jsonl": readers.read_jsonl,
    ".jsonl.gz": readers.read_jsonl,
    ".jsonl.zst": readers.read_jsonl,
    ".parquet": columns.read_parquet,
    ".arrow": columns.read_arrow,
    ".tar": read_tar,
}


#: The `--extension` for every file that is UTF-8 text.
ANY = "any"


class InputFile(NamedTuple):
    """One input file."""

    path: Path
    read: Reader
    num_bytes: int
    """Size of the file, compressed or not."""


def find_sources(inputs: Sequence[str], extensions: Sequence[str] = ()) -> list[InputFile]:
    """Find the files of all inputs, in the given order; those of a folder are sorted by path.

    Args:     inputs: files, folders (searched recursively), or "stdlib". extensions: the endings of
              the files to read, such as ".py", or ANY. Files without a reader of their own are
              text. Empty: files with a reader.
    Raises:   ConfigError for an input that is missing, has an unknown format, or has no documents,
              and for what is no ending.
    """
    if not inputs:
        raise ConfigError("--input", "", "must not be empty", f"use --input {STDLIB}")
    readers_by_ending = _readers(extensions)
    sources: list[InputFile] = []
    for name in inputs:
        found = _stdlib_sources() if name == STDLIB else _path_sources(name, readers_by_ending)
        sources += found
    return sources


def _readers(extensions: Sequence[str]) -> dict[str, Reader]:
    """Return the readers by ending: the first that fits counts. That of ANY is the empty ending."""
    chosen: dict[str, Reader] = {}
    for given in extensions:
        ending = "" if given == ANY else f".{given.removeprefix('.')}".lower()
        if ending == "." or "/" in given:
            rule, fix = "is not the ending of a file's name", f"use --extension .py .md, or {ANY}"
            raise ConfigError("--extension", given, rule, fix)
        chosen[ending] = READERS.get(ending, readers.read_text)
    if "" in chosen:
        return {**READERS, "": readers.read_text}
    return chosen or READERS


def read_pieces(sources: Sequence[InputFile], options: ReadOptions) -> Iterator[Piece]:
    """Read all documents of the sources in order, as pieces of bounded length.

    Returns:  pieces whose `position` counts the bytes of all sources; `file` is their number.
    Raises:   ConfigError that names an unreadable file and line.
    """
    before = 0
    for number, (path, read, num_bytes) in enumerate(sources):
        try:
            with path.open("rb") as file:
                for piece in read(file, path, options):
                    yield piece._replace(position=before + piece.position, file=number)
        except OSError as error:
            rule = f"cannot be read: {error.strerror or error}"
            fix = "check the file and its permissions"
            raise ConfigError("--input", str(path), rule, fix) from error
        before += num_bytes


def _path_sources(name: str, known: Mapping[str, Reader]) -> list[InputFile]:
    path, kinds = Path(name), ", ".join(known)
    if path.is_file():
        read = _reader(path, known)
        if read is None:
            fix = f"convert it to one of {', '.join(READERS)}"
            if path.suffix:
                fix += f", or read it as text with --extension {path.suffix}"
            raise ConfigError("--input", name, f"is not one of {kinds}", fix)
        return [InputFile(path, read, path.stat().st_size)]
    if not path.is_dir():
        fix = f"use a file, a folder, or {STDLIB} for the source code of Python"
        raise ConfigError("--input", name, "does not exist", fix)
    files = [(p, _reader(p, known)) for p in _files_in(path, known)]
    sources = [InputFile(p, read, p.stat().st_size) for p, read in files if read]
    if "" in known:
        sources = [s for s in sources if s.read is not readers.read_text or _is_text(s.path, path)]
    if not sources:
        what = "text" if "" in known else f"{kinds} file"
        fix = "use another folder, or --extension for files with other names"
        raise ConfigError("--input", name, f"has no {what}", fix)
    return sources


def _is_text(path: Path, folder: Path) -> bool:
    """Return whether a file is UTF-8 text, and no part of its path is hidden, such as .git."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and _is_utf8(path)


def _files_in(
    folder: Path, known: Mapping[str, Reader], above: frozenset[Path] = frozenset()
) -> list[Path]:
    """Return the files below a folder, sorted, following links; for a saved Hugging Face dataset,
    its shards in order.

    Args:     above: the parent folders, to detect loops of links.
    Raises:   ConfigError for a broken link to a file of a known format.
    """
    shards = columns.saved_shards(folder)
    if shards is not None:
        return shards
    above |= {folder.resolve()}
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files += [] if path.resolve() in above else _files_in(path, known, above)
        elif path.is_file():
            files.append(path)
        elif path.is_symlink() and _reader(path, known):
            fix = "restore its target, or remove the link"
            raise ConfigError("--input", str(path), "is a link to a missing file", fix)
    return files


def _reader(path: Path, known: Mapping[str, Reader]) -> Reader | None:
    return next((read for end, read in known.items() if path.name.lower().endswith(end)), None)


def _stdlib_sources() -> list[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = (p for p in sorted(root.rglob("*.py")) if not installed & set(p.parts))
    # Python's tests have files in other encodings, on purpose.
    sources = [InputFile(p, readers.read_text, p.stat().st_size) for p in files if _is_utf8(p)]
    if not sources:
        fix = "use a Python that is not zipped, or another --input"
        raise ConfigError("--input", STDLIB, f"found no .py file below {root}", fix)
    return sources


def _is_utf8(path: Path) -> bool:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return "\0" not in text
