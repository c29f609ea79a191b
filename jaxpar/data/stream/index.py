"""The index of a streamed dataset: where the text of each part of a document is.

stream.json         the files of the text, each with its size and a hash of samples
frames.npy          int64 [frames, 5]: file, and the fields of `frames.Frame`, of Zstandard files
SPLIT.parts.bin     PART [parts], in the order of the tokens
SPLIT.starts.bin    int64 [parts]: the first token of each, which is a file of its own for searches
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from msgspec import Struct

from jaxpar.config import ConfigError, declared
from jaxpar.config.declared import Count, Name
from jaxpar.data.formats.arrays import mapped
from jaxpar.data.formats.meta import FRAMES_FILE, STREAM_FILE, parts_file, starts_file
from jaxpar.data.formats.token_file import sampled_hash

FORMAT: Literal["jaxpar-stream"] = "jaxpar-stream"
VERSION = 1

#: Pieces of 4 KiB of each file whose hash is compared when a dataset is opened.
SAMPLES = 16

#: A part: 33 bytes.
PART = np.dtype(
    [
        ("count", "<u4"),  # its tokens, without an end of text
        ("file", "<u4"),
        ("kind", "u1"),  # `readers.Record`
        ("start", "<i8"),
        ("size", "<u4"),
        ("first", "<u4"),  # characters of the record's text before it
        ("chars", "<u4"),
        ("check", "<u4"),  # `check_of` of its tokens and the other fields
    ]
)


@dataclass(frozen=True)
class StreamFile:
    """A file of text."""

    path: Name
    size: Count
    samples: Name
    """Hash of SAMPLES pieces of it."""


class StreamJson(Struct, frozen=True, kw_only=True):
    """The content of stream.json."""

    VERSION: ClassVar[int] = VERSION

    format: Literal["jaxpar-stream"]
    text_field: Name
    sha256: dict[Name, Name]
    files: tuple[StreamFile, ...]


@dataclass(frozen=True, eq=False)
class StreamIndex:
    """The files of a streamed dataset."""

    folder: Path
    text_field: str
    files: tuple[StreamFile, ...]
    frames: np.ndarray
    """int64 [frames, 5]."""
    sha256: dict[str, str]
    """Hashes of the files of the splits, by name."""

    def frames_of(self, file: int) -> np.ndarray:
        """Return the frames of a file, int64 [frames, 4]: the fields of `frames.Frame`."""
        first, end = np.searchsorted(self.frames[:, 0], [file, file + 1])
        return self.frames[first:end, 1:]


def check_of(part: np.ndarray, ids: np.ndarray) -> int:
    """Return a checksum of a part, which is in its field `check`.

    Args:     part: PART scalar. ids: int32 [tokens], of its text.
    """
    about = part.tobytes()[: -PART["check"].itemsize]
    return zlib.crc32(np.ascontiguousarray(ids, "<i4"), zlib.crc32(about))


def write_index(index: StreamIndex) -> None:
    """Write stream.json and frames.npy."""
    np.save(index.folder / FRAMES_FILE, index.frames)
    content = StreamJson(
        format=FORMAT, text_field=index.text_field, sha256=index.sha256, files=index.files
    )
    (index.folder / STREAM_FILE).write_text(declared.to_json(content, indent=1) + "\n", "utf-8")


def read_index(folder: Path) -> StreamIndex:
    """Read the index of a dataset folder.

    Raises:   ConfigError("data.path", ...) if it is damaged.
    """
    path = folder / STREAM_FILE
    try:
        found = declared.read(StreamJson, path, what="it")
        frames = np.load(folder / FRAMES_FILE, allow_pickle=False)
        if frames.ndim != 2 or frames.shape[1] != 5 or frames.dtype != np.int64:
            raise ValueError(f"{FRAMES_FILE} has {frames.dtype} {list(frames.shape)}")
        return StreamIndex(folder, found.text_field, found.files, frames, found.sha256)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # which may be transient
        rule = f"{path} is not the index of a streamed dataset ({error})"
        raise ConfigError("data.path", str(folder), rule, PREPARE_AGAIN) from error


PREPARE_AGAIN = "copy the folder again, or prepare it again with --stream --overwrite"


def map_parts(folder: Path, split: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the parts of a split.

    Returns:  parts, PART [parts]; the first token of each, int64 [parts].
    Raises:   ConfigError("data.path", ...) if a file is missing, or they do not fit together.
    """
    parts = _map(folder / parts_file(split), PART)
    starts = _map(folder / starts_file(split), np.dtype("<i8"))
    end = int(starts[-1]) + int(parts[-1]["count"])
    if len(parts) != len(starts) or not end <= num_tokens <= end + 1:
        rule = f"{split} has {len(parts):,} and {len(starts):,} parts up to token {end:,}, but "
        rule += f"meta.json records {num_tokens:,}"
        raise ConfigError("data.path", str(folder), rule, PREPARE_AGAIN)
    return parts, starts


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else None
    if not size or size % dtype.itemsize:
        state = "is missing" if size is None else f"has {size:,} bytes"
        rule = f"{path} {state}, not a multiple of {dtype.itemsize}"
        raise ConfigError("data.path", str(path.parent), rule, PREPARE_AGAIN)
    return mapped(path, dtype)


def check_files(index: StreamIndex) -> None:
    """Check that the files of the text are those of the index, by size and samples.

    A file is looked at once in a process, unless it changes.

    Raises:   ConfigError("data.path", ...) for a file that is missing or has changed.
    """
    with ThreadPoolExecutor(16, thread_name_prefix="check-text") as pool:
        wrong = [rule for rule in pool.map(_difference, index.files) if rule]
    if wrong:
        more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
        fix = f"restore it, or index again: prepare --stream --output {index.folder} --overwrite"
        raise ConfigError("data.path", str(index.folder), wrong[0] + more, fix)


_unchanged: set[tuple[StreamFile, int, int]] = set()


def _difference(file: StreamFile) -> str:
    """Return what is wrong with a file, or ""."""
    path = Path(file.path)
    if not path.is_file():
        return f"is an index of {path}, which is missing"
    about = path.stat()
    if about.st_size != file.size:
        return f"is an index of {path}, which had {file.size:,} bytes and has {about.st_size:,}"
    key = file, about.st_mtime_ns, about.st_ino
    if key not in _unchanged:
        if sampled_hash(path, file.size, SAMPLES) != file.samples:
            return f"is an index of {path}, which has changed since"
        _unchanged.add(key)
    return ""
