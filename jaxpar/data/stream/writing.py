"""Writes the index of a streamed dataset: what `prepare --stream` writes in place of tokens."""

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import compression
from jaxpar.data.formats.meta import SplitMeta, parts_file, starts_file
from jaxpar.data.formats.readers import Piece, read_text
from jaxpar.data.formats.remembered import sampled_hash
from jaxpar.data.formats.writer import SplitWriter, TextPart
from jaxpar.data.prepare.documents import InputFile
from jaxpar.data.stream.frames import find_frames
from jaxpar.data.stream.index import (
    PART,
    SAMPLES,
    StreamFile,
    StreamIndex,
    check_of,
    write_index,
)
from jaxpar.data.stream.recent import Recent
from jaxpar.data.stream.tables import open_table
from jaxpar.data.stream.texts import MAX_BLOCK

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

    def close(self) -> SplitMeta:
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
