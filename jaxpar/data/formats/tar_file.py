"""Reader for tar files of text, as WebDataset writes them."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxpar.data.formats.compressed import MAX_LINE_BYTES, BadRow, Kinds, bad_row, input_error
from jaxpar.data.formats.json_file import json_text
from jaxpar.data.formats.readers import JSON_OBJECT, TEXT, Piece, ReadOptions, Record, cut, in_bytes
from jaxpar.runtime.units import size

#: The members that hold a sample's text, the first that is there.
ENDINGS = (".txt", ".json")


def read_tar(file: BinaryIO, path: Path, options: ReadOptions) -> Iterator[Piece]:
    """Read the documents of an uncompressed tar file: one for each sample.

    A sample is the members in a row whose names are the same up to the first dot of the last part.
    Its text is its .txt, or else the text field of its .json. Other members are counted.

    Raises:   ConfigError for a damaged file, or one most of whose bytes are in other members.
    """
    left_out = options.rows.members[path] = Kinds()
    num_read = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in _texts(archive, left_out):
                num_read += member.size
                try:
                    yield from _document(archive, member, file, path, options)
                except BadRow as error:
                    options.rows.bad(error)
            _check_end(archive, file)
    except tarfile.TarError as error:
        rule = f"is not a complete tar file ({error})"
        raise input_error(str(path), rule, "download or write it again, uncompressed") from error
    if left_out.num_bytes > num_read and not options.partly:
        rule = f"has {size(num_read)} of text, and members that are not read: {left_out}"
        fix = "leave them out with --extension .tar, or write their text as .txt"
        raise input_error(str(path), rule, fix)


def _texts(archive: tarfile.TarFile, left_out: Kinds) -> Iterator[tarfile.TarInfo]:
    """Yield the member with the text of each sample, and count the others."""
    sample, found = "", dict[str, tarfile.TarInfo]()
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # memory would grow with them
        folder, _, name = member.name.rpartition("/")
        stem, _, _ = name.partition(".")
        if f"{folder}/{stem}" != sample:
            yield from _first(found, left_out)
            sample, found = f"{folder}/{stem}", {}
        ending = Path(name).suffix.lower()
        if member.isreg() and ending in ENDINGS and ending not in found:
            found[ending] = member
        elif not member.isdir():
            left_out.add(ending or "without an ending", member.size)
    yield from _first(found, left_out)


def _check_end(archive: tarfile.TarFile, file: BinaryIO) -> None:
    """Raise ReadError unless zeros end the archive: tarfile takes a damaged header for the end."""
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"neither a member nor the end at byte {archive.offset:,}")


def _first(found: dict[str, tarfile.TarInfo], left_out: Kinds) -> list[tarfile.TarInfo]:
    texts = [(ending, found[ending]) for ending in ENDINGS if ending in found]
    for ending, member in texts[1:]:
        left_out.add(ending, member.size)
    return [member for _, member in texts[:1]]


def _document(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    file: BinaryIO,
    path: Path,
    options: ReadOptions,
) -> Iterator[Piece]:
    where = f"{path}, {member.name}"
    if member.size > MAX_LINE_BYTES:
        rule = f"is longer than {MAX_LINE_BYTES:,} bytes"
        raise bad_row(where, rule, "remove it, or split its document")
    if member.issparse():
        raise bad_row(where, "is a sparse file", "write the tar file without --sparse")
    opened = archive.extractfile(member)
    assert opened is not None  # a regular file
    data, start = opened.read(), member.offset_data
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} ends after {len(data):,} of {member.size:,} bytes")
    try:
        text = data.decode("utf-8")
        if member.name.lower().endswith(".txt"):
            yield from in_bytes(cut([text], file.tell, Record(TEXT, start, 0)))
            return
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise bad_row(where, "is not UTF-8", "convert it to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise bad_row(where, f"is not valid JSON ({error})", "repair or remove it") from error
    record = Record(JSON_OBJECT, start, len(data))
    yield from cut([json_text(value, options.text_field, where)], file.tell, record)
