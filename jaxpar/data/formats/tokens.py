"""Memory-mapped splits of dataset folders, which open without reading the tokens."""

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.meta import (
    META_FILE,
    PREPARE,
    SPLITS,
    STREAM_FILE,
    TEST,
    TRAIN,
    Meta,
    SplitMeta,
    documents_file,
    parts_file,
    read_meta,
    targets_file,
    tokens_file,
)

if TYPE_CHECKING:
    from jaxpar.data.stored import StoredFolder

#: Datasets of stores that this process has opened, by the folder of the copy of their small files.
STORED: "dict[Path, StoredFolder]" = {}


class WindowedArray(abc.ABC):
    """Integers [N] that are not in memory. A slice is an array, and is read as one stretch."""

    dtype: np.dtype
    _length: int

    @abc.abstractmethod
    def place(self, token: int) -> str:
        """Return the place of an element, for an error."""

    @abc.abstractmethod
    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of the array: [N, length].

        Args:     starts: int64 [N]; start + length is at most the length of the array.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._length * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | slice) -> np.ndarray:
        if not isinstance(key, slice):
            return self.windows(np.array([range(self._length)[key]]), 1)[0, 0]
        first, end, step = key.indices(self._length)
        found: np.ndarray = self.windows(np.array([first]), max(end - first, 0))[0, ::step]
        return found


#: Documents to check for a common beginning.
LOOKED_AT = 16

#: Document offsets to compare at a time.
AT_A_TIME = 1 << 20


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """The tokens of one split, and the starts of its documents."""

    path: Path
    """Folder or file, as given."""
    split: str
    vocab_size: int
    """One more than the largest token id that may occur."""
    fingerprint: str
    """Identity of the data, independent of its location."""
    tokens: "np.ndarray | WindowedArray"
    """Unsigned or signed integers [num_tokens], memory-mapped; or tokenized, or read from a store,
    when they are needed."""
    document_offsets: np.ndarray
    """int64 [num_documents + 1]: increasing from 0 to num_tokens."""
    file: Path
    """File of the tokens, which start after header_bytes."""
    header_bytes: int = 0
    meta: Meta | None = None
    """Contents of meta.json, in a folder that has it."""
    targets: "np.ndarray | WindowedArray | None" = None
    """uint8 [num_tokens], like tokens: 1 for tokens in the loss. None: all tokens."""
    knows_documents: bool = True
    """Whether documents are marked. If not, all tokens are one document."""

    @classmethod
    def open(cls, folder: str | Path, split: str = TRAIN, workers: int = 0) -> "TokenDataset":
        """Memory-map a split of a dataset folder.

        Args:     workers: processes that tokenize the text of a streamed dataset. 0: this one.
        Raises:   ConfigError("data.path", ...) if the folder is not a dataset, the split is empty,
                  the size of a file differs from meta.json, or a document ends before it starts.
        """
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        folder = Path(folder)
        meta = read_meta(folder)
        sizes = meta.splits.get(split)
        if sizes is None or sizes.num_tokens == 0:
            fix = "prepare it with --holdout 0.02, or use --evaluation.every 0"
            if split == TRAIN:
                fix = "use a dataset with text for training"
            if split == TEST:
                fix = "prepare it with --split 98,1,1, or use --evaluation.split val"
            raise ConfigError("data.path", str(folder), f"has an empty {split} split", fix)
        streamed = (folder / STREAM_FILE).is_file()
        known = None if streamed else _map_tokens(folder, split, meta)
        offsets = _map_offsets(folder, split, sizes)
        tokens: np.ndarray | WindowedArray
        if known is None:
            from jaxpar.data.stream.tokens import StreamedTokens

            tokens = StreamedTokens.open(folder, split, meta, workers, offsets)
        else:
            tokens = known
        found = cls(
            path=folder,
            split=split,
            vocab_size=meta.vocab_size,
            fingerprint=meta.fingerprint,
            tokens=tokens,
            document_offsets=offsets,
            file=folder / (parts_file if streamed else tokens_file)(split),
            meta=meta,
            targets=_map_targets(folder, split, sizes),
        )
        if folder in STORED:  # perhaps copied by another program, or through a proxy
            found.check_offsets()
        return found

    @property
    def name(self) -> str:
        """Where the data is, for a person: a path, or an address."""
        stored = STORED.get(self.path)
        return str(self.path) if stored is None else str(stored.address)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including ends of text."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.document_offsets) - 1

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token: bits per byte = loss / log(2) / bytes_per_token.

        None if the length of the text is unknown.
        """
        num_bytes = self.meta.splits[self.split].num_bytes if self.meta else 0
        return num_bytes / self.num_tokens if num_bytes else None

    def check_hash(self, file: Path, found: str, recorded: str) -> None:
        """Raise ConfigError("data.path", ...) if a file's hash differs from the recorded one."""
        if found != recorded:
            rule = f"{file} has sha256 {found[:16]}, but {META_FILE} records {recorded[:16]}"
            fix = "copy the folder again, or prepare it again"
            raise ConfigError("data.path", str(self.path), rule, fix)

    def check_offsets(self) -> None:
        """Raise ConfigError("data.path", ...) if document offsets differ from meta.json."""
        if self.meta is not None:
            recorded = self.meta.splits[self.split].documents_sha256
            offsets = np.ascontiguousarray(self.document_offsets, "<i8")
            file = self.path / documents_file(self.split)
            self.check_hash(file, hashlib.sha256(offsets).hexdigest(), recorded)

    def begins_with(self, ids: Sequence[int]) -> bool:
        """Return whether documents start with these ids, from the first few documents."""
        starts = self.document_offsets[:-1][:LOOKED_AT]
        return all(self.tokens[i : i + len(ids)].tolist() == list(ids) for i in starts)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of tokens: int32 [N, length].

        Args:     starts: int64 [N], first tokens; start + length is at most num_tokens.
        """
        return windows(self.tokens, starts, length)

    def place(self, token: int) -> str:
        """Return the place of a token, for an error."""
        if not isinstance(self.tokens, np.ndarray):
            return self.tokens.place(token)
        at = self.header_bytes + token * self.tokens.dtype.itemsize
        return f"token {token:,} of {self.file} (byte {at:,})"


def windows(values: np.ndarray | WindowedArray, starts: np.ndarray, length: int) -> np.ndarray:
    """Return stretches of an array: int32 [N, length]."""
    if not isinstance(values, np.ndarray):
        return values.windows(starts, length).astype(np.int32)
    return np.stack([values[start : start + length] for start in starts]).astype(np.int32)


def _map_tokens(folder: Path, split: str, meta: Meta) -> np.ndarray | WindowedArray:
    path, dtype = folder / tokens_file(split), np.dtype(meta.dtype).newbyteorder("<")
    expected = meta.splits[split].num_tokens * dtype.itemsize
    if stored := STORED.get(folder):
        return stored.array(path.name, dtype, expected, meta.splits[split].sha256)
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise _damaged(folder, f"{path} {state}, but meta.json records {expected:,} bytes")
    return np.memmap(path, dtype, mode="r")


def _map_targets(folder: Path, split: str, sizes: SplitMeta) -> np.ndarray | WindowedArray | None:
    if not sizes.targets_sha256:
        return None
    path = folder / targets_file(split)
    if stored := STORED.get(folder):
        of = np.dtype(np.uint8), sizes.num_tokens, sizes.targets_sha256
        return stored.array(path.name, *of)
    found = path.stat().st_size if path.is_file() else None
    if found != sizes.num_tokens:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise _damaged(folder, f"{path} {state}, but there are {sizes.num_tokens:,} tokens")
    return np.memmap(path, np.uint8, mode="r")


def _map_offsets(folder: Path, split: str, sizes: SplitMeta) -> np.ndarray:
    path = folder / documents_file(split)
    try:
        offsets = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # for a damaged header, NumPy raises errors of several kinds
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # which may be transient
        raise _damaged(folder, f"{path} cannot be read ({error})") from error
    if offsets.shape != (sizes.num_documents + 1,) or offsets.dtype != np.int64:
        expected = f"int64 [{sizes.num_documents + 1}]"
        found = f"{offsets.dtype} {list(offsets.shape)}"
        raise _damaged(folder, f"{path} has {found}, not {expected}")
    if (offsets[0], offsets[-1]) != (0, sizes.num_tokens):
        ends = f"{offsets[0]:,} to {offsets[-1]:,}"
        raise _damaged(folder, f"{path} runs from {ends}, not from 0 to {sizes.num_tokens:,}")
    for first in range(0, len(offsets), AT_A_TIME):
        some = offsets[first : first + AT_A_TIME + 1]
        falls = np.flatnonzero(some[1:] < some[:-1])
        if len(falls):
            at = first + int(falls[0])
            rule = f"{path} drops from {offsets[at]:,} to {offsets[at + 1]:,} at document {at:,}"
            raise _damaged(folder, rule)
    return offsets


def _damaged(folder: Path, rule: str) -> ConfigError:
    fix = f"copy the folder again, or prepare it again with `{PREPARE} {folder} --overwrite`"
    return ConfigError("data.path", str(folder), rule, fix)
