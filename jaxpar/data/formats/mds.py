"""Folders of MosaicML's MDS shards with a column of tokens."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.data.formats.compressed import decompressed
from jaxpar.data.formats.rows import COLUMNS, RowReader, as_tokens, broken, open_rows
from jaxpar.data.formats.token_file import Hints, TokenFile

#: The file that lists the shards of a folder.
INDEX = "index.json"

#: Dtypes of an encoding `ndarray` without one, by number.
ARRAY_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}

#: The dtype of an encoding `bytes`, as of LLM Foundry.
BYTES_DTYPE = "int64"

#: Bytes of a shard, which is in memory as a whole.
MAX_SHARD = 1 << 30


class MdsRows(RowReader):
    """The samples of a folder of MDS shards; a block is a shard.

    A shard is: uint32 samples; uint32 [samples + 1] bytes at which each starts, and the end; a
    JSON; the samples. A sample is: uint32 sizes of the columns without a fixed one; the columns.

    Source:   `streaming/base/format/mds` of MosaicML Streaming.
    """

    def __init__(self, path: Path, hints: Hints):
        """Args:     path: of the index. Raises:   ConfigError for a damaged one, or no tokens."""
        self.path, self._dtype = path, hints.dtype or BYTES_DTYPE
        try:
            about = read_json_object(path)
            self._shards = [_Shard.read(shard) for shard in about["shards"]]
        except (UnreadableJson, KeyError, TypeError, ValueError) as error:
            rule = f"is not an index of MDS shards ({' '.join(str(error).split())[:200]})"
            raise broken(path, rule) from error
        self.num_blocks = len(self._shards)

    def read(self, block: int) -> list[np.ndarray]:
        """Return the rows of a shard."""
        shard = self._shards[block]
        path = self.path.parent / shard.name
        data = self._content(path, shard)
        ends = np.frombuffer(data, "<u4", count=min(shard.samples + 2, len(data) // 4))
        ok = len(ends) == shard.samples + 2 and ends[0] == shard.samples and ends[-1] == len(data)
        if not ok or (np.diff(ends[1:].astype(np.int64)) < 0).any():
            raise broken(path, f"does not have the {shard.samples:,} samples that {INDEX} records")
        spans = zip(ends[1:-1].tolist(), ends[2:].tolist(), strict=True)
        return [
            self._row(data[first:last], shard, f"{path}, sample {i}")
            for i, (first, last) in enumerate(spans)
        ]

    def _content(self, path: Path, shard: "_Shard") -> bytes:
        stored = path if path.is_file() or not shard.packed else path.with_name(shard.packed)
        if not stored.is_file():
            raise broken(stored, f"is missing, but {self.path} lists it", "copy the folder again")
        with stored.open("rb") as file, decompressed(file, stored) as content:
            data = content.read(shard.size + 1)
        if len(data) != shard.size:
            rule = f"has {len(data):,} bytes or more, but {INDEX} records {shard.size:,}"
            raise broken(stored, rule)
        return data

    def _row(self, sample: bytes, shard: "_Shard", where: str) -> np.ndarray:
        sizes, at = [], 0
        for fixed in shard.sizes:
            sizes.append(fixed or int.from_bytes(sample[at : at + 4], "little"))
            at += 0 if fixed else 4
        number = next((i for i, name in enumerate(shard.columns) if name in COLUMNS), None)
        if number is None:
            rule = f"has no column {' or '.join(COLUMNS)}, only {', '.join(shard.columns)}"
            raise broken(where, rule, "use a folder of tokens")
        at += sum(sizes[:number])
        data, encoding = sample[at : at + sizes[number]], shard.encodings[number]
        if len(data) != sizes[number]:
            raise broken(where, f"ends after {len(sample):,} bytes, inside its tokens")
        try:
            return as_tokens(_array(data, encoding, self._dtype), where)
        except (ValueError, IndexError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            rule, fix = f"is not readable as {encoding} ({error})", "write tokens as ndarray:int32"
            raise broken(where, rule, fix) from error


class _Shard(NamedTuple):
    """What the index records of a shard."""

    name: str
    packed: str
    """The compressed file, or ""."""
    size: int
    """Bytes, decompressed."""
    samples: int
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each column; 0 if they differ."""

    @classmethod
    def read(cls, about: Any) -> "_Shard":
        """Raises:   KeyError, TypeError, ValueError."""
        if (about["version"], about["format"]) != (2, "mds"):
            raise ValueError(f"format {about['format']!r}, version {about['version']!r}")
        packed = (about.get("zip_data") or {}).get("basename") or ""
        columns, encodings = tuple(about["column_names"]), tuple(about["column_encodings"])
        sizes = tuple(size or 0 for size in about["column_sizes"])
        raw, count = about["raw_data"], about["samples"]
        found = cls(raw["basename"], packed, raw["bytes"], count, columns, encodings, sizes)
        for name in (found.name, packed):
            if not isinstance(name, str) or ".." in name.split("/") or name.startswith("/"):
                raise ValueError(f"a shard named {name!r}")
        numbers = (found.size, found.samples, *sizes)
        if not all(type(n) is int and 0 <= n <= MAX_SHARD for n in numbers):
            raise ValueError(f"sizes {numbers}")
        if not len(columns) == len(encodings) == len(sizes):
            raise ValueError(f"{len(columns)} columns with {len(sizes)} sizes")
        return found


def _array(data: bytes, encoding: str, dtype_of_bytes: str) -> np.ndarray:
    """Return the tokens of a sample. Raises:   ValueError for another encoding, or damage."""
    kind, *given = encoding.split(":")
    if kind == "bytes":
        return np.frombuffer(data, np.dtype(dtype_of_bytes).newbyteorder("<"))
    if kind != "ndarray":
        raise ValueError("not an encoding of tokens")
    at = 0
    if given and given[0]:
        dtype = np.dtype(given[0]).newbyteorder("<")
    else:
        dtype, at = np.dtype(ARRAY_DTYPES[data[0]]), 1
    if len(given) < 2:  # a byte with the number of dimensions, and of the bytes of each
        at += 1 + (data[at] >> 2) * (1 << data[at] % 4)
    return np.frombuffer(data[at:], dtype)


def find(path: Path) -> Path | None:
    """Return the index of a folder of MDS shards, by its own path; None for other files."""
    if path.name != INDEX or not path.is_file():
        return None
    try:
        first = read_json_object(path)["shards"][0]
        return path if first["format"] == "mds" else None
    except (UnreadableJson, LookupError, TypeError):
        return None


def read(path: Path, hints: Hints) -> TokenFile | None:
    """Open a folder of shards by its index. None: there are no tokens. Raises:   ConfigError."""
    return open_rows(MdsRows(path, hints), cached=False)
