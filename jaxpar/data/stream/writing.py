"""Writes the index of a streamed dataset: what `prepare --stream` writes in place of tokens."""

import hashlib
import mmap
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import READ_BYTES, compression, damaged, import_pyarrow
from jaxpar.data.formats.meta import Part, parts_file, starts_file
from jaxpar.data.formats.readers import Piece, read_text
from jaxpar.data.formats.token_file import sampled_hash
from jaxpar.data.formats.writer import SplitWriter, TextPart
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.stream.index import (
    PART,
    SAMPLES,
    StreamFile,
    StreamIndex,
    check_of,
    write_index,
)
from jaxpar.data.stream.texts import MAX_BLOCK, Recent, open_table
from jaxpar.data.tokenizer import Tokenizer

# ----------- Finds the frames of a Zstandard file: each can be decompressed without those before it
#
# Source:   RFC 8878, section 3.1.


_MAGIC, _SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
_RLE = 1


class Frame(NamedTuple):
    """A frame of a compressed file, and the text in it."""

    start: int
    """First byte in the file."""
    size: int
    """Compressed bytes."""
    text_start: int
    """First byte in the decompressed file."""
    text_size: int
    """Decompressed bytes."""


def find_frames(path: Path) -> list[Frame]:
    """Return the frames of a Zstandard file in order, but not the skippable ones.

    Reads the headers of frames and blocks. A frame that does not say how long its text is, is
    decompressed.

    Raises:   ConfigError for a file that is damaged or truncated.
    """
    size, frames, at, text_end = path.stat().st_size, list[Frame](), 0, 0
    if size == 0:
        raise _damaged(path, at)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while at < size:
            magic = int.from_bytes(data[at : at + 4], "little")
            if magic in _SKIPPABLE:
                at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
                continue
            if magic != _MAGIC or at + 6 > size:
                raise _damaged(path, at)
            end, text_size = _walk(data, at, size, path)
            if text_size is None:
                text_size = _decompressed_size(path, data, at, end)
            frames.append(Frame(at, end - at, text_end, text_size))
            at, text_end = end, text_end + text_size
    if at != size:
        raise _damaged(path, size)
    return frames


def _walk(data: mmap.mmap, start: int, size: int, path: Path) -> tuple[int, int | None]:
    """Return the end of a frame, and the length of its text if its header has it."""
    flags, at = data[start + 4], start + 5
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    at += (not single) + (0, 1, 2, 4)[flags & 3]  # window, dictionary
    width = (single, 2, 4, 8)[flags >> 6]
    text_size = int.from_bytes(data[at : at + width], "little") if width else None
    if text_size is not None and width == 2:
        text_size += 256
    at, last = at + width, False
    while not last:
        if at + 3 > size:
            raise _damaged(path, at)
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, block = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE else block)
    at += 4 * checksum
    if at > size:
        raise _damaged(path, size)
    return at, text_size


def _decompressed_size(path: Path, data: mmap.mmap, start: int, end: int) -> int:
    pyarrow = import_pyarrow(path)
    total = 0
    with path.open("rb") as file:
        file.seek(start)
        inner = pyarrow.PythonFile(_Part(file, end - start), mode="r")
        stream = pyarrow.CompressedInputStream(inner, "zstd")
        try:
            while found := stream.read(READ_BYTES):
                total += len(found)
        except OSError as error:
            raise damaged(path, "zstd", str(error)) from error
    return total


class _Part:
    """The next bytes of an open file, as a file."""

    closed = False

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` of the bytes that are left."""
        size = self._left if size < 0 else min(size, self._left)
        found = self._file.read(size)
        self._left -= len(found)
        return found

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


def _damaged(path: Path, at: int) -> Exception:
    return damaged(path, "zstd", f"byte {at:,}")


# ---- Cuts a text into parts that can be tokenized alone: their tokens in a row are those of the
# text
#
# Whether that holds at a place depends on the tokenizer, so each part is tokenized and compared. A
# place between a word and the space before the next one is fine for byte-level tokenizers. Those
# that put a space before each text, such as Llama 2's, need the space left out.


#: Characters of a part to aim at, about a thousand tokens of English.
PART_CHARS = 4096

#: How often to look for other places in a text that cannot be cut at some.
TRIES = 4

#: Places to cut at: before a space in front of a word, or after a line end in front of a word.
_PLACE = re.compile(r"(?<=\S) (?=[^\W\d_])|(?<=\n)(?=[^\W\d_])")


def one_part(text: str, ids: np.ndarray, tokenizer: Tokenizer) -> list[TextPart]:
    """Return a text as one part."""
    return [TextPart(0, len(text), ids)]


def cut_text(
    text: str, ids: np.ndarray, tokenizer: Tokenizer, tries: int = TRIES
) -> list[TextPart]:
    """Cut a text into parts of about PART_CHARS characters, where the tokenizer allows it.

    Args:     ids: int32 [tokens], of the text. tries: how often to cut what is left at other
              places.
    Returns:  parts in order whose tokens, in a row, are `ids`. Only spaces may lie between them.
    """
    if len(text) <= PART_CHARS or not tries:
        return [TextPart(0, len(text), ids)]
    for leave_out_space in (False, True):
        spans = _spans(text, leave_out_space)
        encoded = tokenizer.encode_batch([text[first:end] for first, end in spans])
        front = _matches(encoded, ids)
        if front == len(spans):
            return [
                TextPart(first, end - first, part)
                for (first, end), part in zip(spans, encoded, strict=True)
            ]
        back = min(_matches(encoded[::-1], ids, from_end=True), len(spans) - front - 1)
        found = _around(text, ids, tokenizer, spans, encoded, (front, back), tries)
        if found:
            return found
    return [TextPart(0, len(text), ids)]


def _around(
    text: str,
    ids: np.ndarray,
    tokenizer: Tokenizer,
    spans: Sequence[tuple[int, int]],
    encoded: Sequence[np.ndarray],
    ends: tuple[int, int],
    tries: int,
) -> list[TextPart] | None:
    """Keep parts at both ends whose tokens are right, and cut the text between them elsewhere."""
    for wider in (0, 1, 4):  # the part before a wrong place may look right
        head, tail = (max(end - wider, 0) for end in ends)
        if head + tail == 0:
            return None
        first, end = spans[head][0], spans[len(spans) - tail - 1][1]
        skipped = sum(map(len, encoded[:head]))
        stop = len(ids) - sum(map(len, encoded[len(spans) - tail :]))
        wanted = ids[skipped:stop]
        if np.array_equal(tokenizer.encode(text[first:end]), wanted):
            inner = cut_text(text[first:end], wanted, tokenizer, tries - 1)
            kept = [TextPart(a, b - a, part) for (a, b), part in zip(spans, encoded, strict=True)]
            middle = [part._replace(first=part.first + first) for part in inner]
            return [*kept[:head], *middle, *kept[len(spans) - tail :]]
    return None


def _spans(text: str, leave_out_space: bool) -> list[tuple[int, int]]:
    """Return the first character and the end of each part."""
    spans, first = [], 0
    while len(text) - first > PART_CHARS:
        place = _PLACE.search(text, first + PART_CHARS // 2, first + 2 * PART_CHARS)
        if place is None:
            place = _PLACE.search(text, first + 2 * PART_CHARS)
        if place is None:
            break
        spans.append((first, place.start()))
        first = place.end() if leave_out_space else place.start()
    return [*spans, (first, len(text))]


def _matches(encoded: Sequence[np.ndarray], ids: np.ndarray, from_end: bool = False) -> int:
    """Return how many parts in a row, from one end, have the tokens of the text there."""
    at = 0
    for number, part in enumerate(encoded):
        end = at + len(part)
        found = ids[len(ids) - end : len(ids) - at] if from_end else ids[at:end]
        if end > len(ids) or not np.array_equal(part, found):
            return number
        at = end
    return len(encoded) if at == len(ids) else len(encoded) - 1


#: Pieces to buffer before a write.
FLUSH_ROWS = 1 << 14


class IndexWriter(SplitWriter):
    """Appends parts to the index of a split. Tokens are counted and hashed, but not stored."""

    def __init__(self, folder: Path, split: str, vocab_size: int, eos_id: int):
        super().__init__(folder, split, vocab_size, eos_id)
        self._starts = folder / starts_file(split)
        self._starts.touch()
        self._rows: list[np.ndarray] = []
        self._firsts: list[np.ndarray] = []

    @staticmethod
    def _file_of(split: str) -> str:
        return parts_file(split)

    def _store(self, stored: bytes) -> None:
        """Store no tokens."""

    def append(self, piece: Piece, parts: Sequence[TextPart]) -> None:
        """Add a piece of a document, and the end of text after the last piece."""
        rows = np.zeros(len(parts), PART)
        counts = np.array([len(part.ids) for part in parts], np.int64)
        for i, part in enumerate(parts):
            first = piece.first + part.first
            rows[i] = (counts[i], piece.file, *piece.record, first, part.chars, 0)
            rows[i]["check"] = check_of(rows[i], part.ids)
        self._rows.append(rows[counts > 0])
        self._firsts.append((self.num_tokens + np.cumsum(counts) - counts)[counts > 0])
        super().append(piece, parts)
        if len(self._rows) >= FLUSH_ROWS:
            self._write_rows()

    def close(self) -> Part:
        """Write what is buffered, and the document offsets."""
        self._write_rows()
        return super().close()

    def _write_rows(self) -> None:
        for path, held in ((self._path, self._rows), (self._starts, self._firsts)):
            with path.open("ab") as file:
                file.writelines(array.tobytes() for array in held)
            held.clear()


def begin_index(folder: Path, sources: Sequence[InputFile], text_field: str) -> StreamIndex:
    """Check that parts of the files can be read alone, and return an index of them.

    Raises:   ConfigError for a file of which too much must be decompressed for each part.
    """
    files, frames = [], list[tuple[int, ...]]()
    for number, source in enumerate(sources):
        path = Path(os.path.abspath(source.path))  # the target of a link may have no ending
        name = path.name.lower()
        kind = compression(path)
        if kind not in ("", "zstd"):
            rule = f"is compressed with {kind}, which can only be read from its start"
            if source.read is read_text:
                raise ConfigError("--input", str(source.path), rule, "decompress it first")
            raise _needs_frames(source.path, rule)
        if kind:
            found = find_frames(path)
            _check_blocks(source.path, "frame", [frame.text_size for frame in found])
            frames += [(number, *frame) for frame in found]
        if name.endswith((".parquet", ".arrow")):
            sizes = list(open_table(path, text_field, Recent(0)).block_sizes())
            _check_blocks(source.path, "row group", sizes)
        samples = sampled_hash(path, source.num_bytes, SAMPLES)
        files.append(StreamFile(str(path), source.num_bytes, samples))
    table = np.array(frames, np.int64).reshape(-1, 5)
    return StreamIndex(folder, text_field, tuple(files), table, {})


def _check_blocks(path: Path, what: str, sizes: Sequence[int]) -> None:
    if max(sizes, default=0) > MAX_BLOCK:
        rule = f"has a {what} of {max(sizes) / 2**20:,.0f} MiB, of which each read decodes all"
        raise _needs_frames(path, rule)


def _needs_frames(path: Path, rule: str) -> ConfigError:
    command = f"python -m jaxpar.data reframe --input {shlex.quote(str(path))}"
    return ConfigError("--input", str(path), rule, f"write it again in small frames: {command}")


def finish_index(index: StreamIndex, splits: Sequence[str]) -> None:
    """Write what an index has besides its parts, which are written.

    Raises:   ConfigError for a file of the text that has changed since `begin_index`.
    """
    for file in index.files:
        path = Path(file.path)
        size = path.stat().st_size if path.is_file() else -1
        if size != file.size or sampled_hash(path, size, SAMPLES) != file.samples:
            rule = "has changed while it was read"
            raise ConfigError("--input", file.path, rule, "index it when it is complete")
    for name in [name(split) for split in splits for name in (parts_file, starts_file)]:
        with (index.folder / name).open("rb") as written:
            index.sha256[name] = hashlib.file_digest(written, "sha256").hexdigest()
    write_index(index)
