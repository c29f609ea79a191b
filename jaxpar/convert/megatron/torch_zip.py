"""What `torch.save` writes: a zip of a pickle, and of each tensor's bytes as they are.

A zip may be a part of a file: checkpoints in PyTorch's distributed format put one for every piece
of a tensor into the same file. Bytes of tensors are memory-mapped.
"""

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxpar.convert.megatron.pickle_tree import (
    DAMAGE,
    MAX_BYTES,
    External,
    UnreadablePickle,
    read_pickle,
)
from jaxpar.convert.safetensors_file import DTYPES

#: Names in the format of safetensors, by the class of a storage.
STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
}
REBUILD = "torch._utils._rebuild_tensor_v2"

#: What the pickle of a tensor may name.
_NAMES = (*STORAGES, REBUILD, "collections.OrderedDict")

#: Length of a local header of a zip, before the name.
_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Span:
    """A part of a file."""

    file: Path
    offset: int
    length: int


class _Window(io.RawIOBase):
    """A part of a file as a file, read-only."""

    def __init__(self, span: Span):
        self.source, self.span, self.at = span.file.open("rb"), span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.span.length}[whence]
        self.at = max(start + offset, 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self.span.length - self.at), 0)
        self.source.seek(self.span.offset + self.at)
        data = self.source.read(count)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def close(self) -> None:
        self.source.close()
        super().close()


def read_object(span: Span) -> Any:
    """Read the value of a zip whose pickle may name anything; nothing is looked up.

    Raises:   UnreadablePickle for damage; OSError.
    """
    return _read(span, None)[0]


def open_tensor(span: Span, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Open the tensor of a zip as a memory map.

    Args:     shape, dtype: what it must have; dtype is a name of safetensors.
    Raises:   UnreadablePickle for damage, and for any other tensor; OSError.
    """
    tree, entries = _read(span, _NAMES)
    key, found, offset, size, strides = _described(tree)
    steps = tuple(step for step, n in zip(strides, size, strict=True) if n != 1)
    if (found, size) != (dtype, shape) or steps != _row_major(shape):
        rule = f"holds {found} {list(size)}, not contiguous {dtype} {list(shape)}"
        raise UnreadablePickle(rule)
    count, item = math.prod(shape), DTYPES[dtype].itemsize
    if f"data/{key}" not in entries:
        raise UnreadablePickle(f"has no data/{key}")
    start, num_bytes = entries[f"data/{key}"]
    if offset < 0 or (offset + count) * item > num_bytes:
        raise UnreadablePickle(f"has {num_bytes} bytes for {count} values at {offset}")
    at = span.offset + start + offset * item
    return np.memmap(span.file, DTYPES[dtype], "r", at, shape)


def _described(tree: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return the tensor of a pickle: entry of its storage, dtype, offset, shape and strides."""
    try:
        if tree.of.name != REBUILD or not isinstance(tree.args[0], External):
            raise TypeError("not a tensor")
        stored, offset, size, strides = tree.args[:4]
        _, kind, key, _, _ = stored.reference
        if not all(isinstance(n, int) for n in (offset, *size, *strides)):
            raise TypeError("sizes that are not integers")
        if len(size) != len(strides) or not isinstance(key, str):
            raise TypeError("another number of sizes")
        return key, STORAGES[kind.name], offset, tuple(size), tuple(strides)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadablePickle("does not hold one tensor of 16 or 32 bits") from error


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous array, without those of dims of 1, which do not matter."""
    return tuple(math.prod(shape[i + 1 :]) for i, n in enumerate(shape) if n != 1)


def _read(span: Span, allowed: tuple[str, ...] | None) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return the value of data.pkl, and where each entry is: (offset in the span, bytes)."""
    with _Window(span) as window, io.BufferedReader(window) as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                entries = {}
                for info in archive.infolist():
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise UnreadablePickle("is compressed, as torch.save never does")
                    name = info.filename.partition("/")[2]
                    entries[name] = (_data_start(opened, info), info.file_size)
                    if sum(entries[name]) > min(span.length, _size(span)):
                        raise UnreadablePickle(f"ends before its entry {name}")
                _check_order(opened, entries)
                data = _bytes(opened, *entries["data.pkl"])
        except UnreadablePickle:
            raise
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, *DAMAGE) as error:
            raise UnreadablePickle(f"is not what torch.save writes ({error})") from error
    return read_pickle(data, allowed), entries


def _size(span: Span) -> int:
    """The bytes that the file has from the span's start, which a damaged index may overstate."""
    return span.file.stat().st_size - span.offset


def _data_start(opened: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where an entry's bytes begin: behind its name and the extra field."""
    header = _bytes(opened, info.header_offset, _LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
        raise UnreadablePickle("has a damaged header")
    lengths = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return info.header_offset + _LOCAL_HEADER + sum(lengths)


def _check_order(opened: BinaryIO, entries: dict[str, tuple[int, int]]) -> None:
    if "byteorder" in entries and _bytes(opened, *entries["byteorder"]) != b"little":
        raise UnreadablePickle("is not little-endian")


def _bytes(opened: BinaryIO, offset: int, length: int) -> bytes:
    if length > MAX_BYTES:
        raise UnreadablePickle(f"has an entry of {length} bytes")
    opened.seek(offset)
    return opened.read(length)
