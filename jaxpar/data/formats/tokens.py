"""Splits of dataset folders, which open without reading the tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import DocumentOffsets, FileArray, Joined, SortedFile, WindowedArray
from jaxpar.data.formats.identity import StreamHash
from jaxpar.data.formats.meta import (
    META_FILE,
    PREPARE,
    SPLITS,
    STREAM_FILE,
    TEST,
    TRAIN,
    Meta,
    Part,
    documents_file,
    parts_file,
    read_meta,
    targets_file,
    tokens_file,
)
from jaxpar.data.formats.token_file import chunks

if TYPE_CHECKING:
    from jaxpar.data.stored import StoredFolder

#: Datasets of stores that this process has opened, by the folder of the copy of their small files.
STORED: "dict[Path, StoredFolder]" = {}

#: Documents to check for a common beginning.
LOOKED_AT = 16


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
    tokens: Joined
    """Unsigned or signed integers [num_tokens]: the parts in a row. They are read from files
    or a store, or tokenized, when they are needed."""
    document_offsets: DocumentOffsets
    """int64 [num_documents + 1]: increasing from 0 to num_tokens."""
    files: tuple[Path, ...]
    """The file of the tokens of each part."""
    meta: Meta | None = None
    """Contents of meta.json, in a folder that has it."""
    parts: tuple[Part, ...] = ()
    """What it says about the parts, in a folder that has it."""
    targets: Joined | None = None
    """uint8 [num_tokens], like tokens: 1 for tokens in the loss. None: all tokens."""
    knows_documents: bool = True
    """Whether documents are marked. If not, all tokens are one document."""

    @classmethod
    def open(cls, folder: str | Path, split: str = TRAIN, workers: int = 0) -> "TokenDataset":
        """Open a split of a dataset folder.

        Args:     workers: processes that tokenize the text of a streamed dataset. 0: this one.
        Raises:   ConfigError("data.path", ...) if the folder is not a dataset, the split is empty,
                  or a file has another size than in meta.json.
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
        parts = tuple(part for part in sizes.parts if part.num_tokens)
        streamed, tokens = (folder / STREAM_FILE).is_file(), list[WindowedArray]()
        if not streamed:
            dtype = np.dtype(meta.dtype).newbyteorder("<")
            tokens = [_map(folder, tokens_file(p.name), dtype, p, p.sha256) for p in parts]
        offsets = [_map_offsets(folder, part) for part in parts]
        if streamed:
            from jaxpar.data.stream.tokens import StreamedTokens

            tokens = [StreamedTokens.open(folder, split, meta, workers, offsets[0])]
        return cls(
            path=folder,
            split=split,
            vocab_size=meta.vocab_size,
            fingerprint=meta.fingerprint,
            tokens=Joined(tokens),
            document_offsets=DocumentOffsets(offsets),
            files=tuple(folder / (parts_file if streamed else tokens_file)(p.name) for p in parts),
            meta=meta,
            parts=parts,
            targets=_map_targets(folder, parts) if sizes.has_targets else None,
        )

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

    def check_hash(self, file: str, found: str, recorded: str, kind: str = "sha256") -> None:
        """Raise ConfigError("data.path", ...) if a hash differs from the recorded one."""
        if found != recorded:
            path = self.path / file
            rule = f"{path} has {kind} {found[:16]}, but {META_FILE} records {recorded[:16]}"
            fix = "copy the folder again, or prepare it again"
            raise ConfigError("data.path", str(self.path), rule, fix)

    def check_offsets(self) -> None:
        """Raise ConfigError("data.path", ...) if document offsets differ from meta.json."""
        for part, offsets in zip(self.parts, self.document_offsets.parts, strict=False):
            file, stored = documents_file(part.name), np.ascontiguousarray(offsets, "<i8")
            found = hashlib.sha256(stored).hexdigest()
            self.check_hash(file, found, part.documents_sha256)
            self._check_stream(file, np.diff(stored), part.documents_hash)

    def checked_chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield chunks of all tokens in order, each with the index of its first token.

        Raises:   ConfigError("data.path", ...) at the end of a part that differs from meta.json.
        """
        before = 0
        for number, array in enumerate(self.tokens.arrays):
            sha256, stream = hashlib.sha256(), StreamHash()
            for start, chunk in chunks(array):
                if self.parts:
                    sha256.update(chunk)
                    stream.update(chunk)
                yield before + start, chunk
            before += len(array)
            if self.parts:
                part, file = self.parts[number], str(self.files[number])
                self.check_hash(file, sha256.hexdigest(), part.sha256)
                self._check_stream(file, stream, part.tokens_hash)

    def check_targets(self) -> None:
        """Raise ConfigError("data.path", ...) if the targets differ from meta.json."""
        arrays = self.targets.arrays if self.targets else ()
        for part, array in zip(self.parts, arrays, strict=False):
            file, marks = targets_file(part.name), array[:]
            self.check_hash(file, hashlib.sha256(marks).hexdigest(), part.targets_sha256)
            self._check_stream(file, marks, part.targets_hash)

    def _check_stream(self, file: str, found: "StreamHash | np.ndarray", recorded: str) -> None:
        if not recorded:  # of version 1
            return
        stream = StreamHash() if isinstance(found, np.ndarray) else found
        if isinstance(found, np.ndarray):
            stream.update(found)
        self.check_hash(file, stream.hex(), recorded, "the hash of a stream")

    def max_documents(self, seq_len: int) -> int:
        """Return an upper bound on the documents in a sequence, wherever it begins."""
        tables = [part.most_documents for part in self.parts]
        most = self.document_offsets.most(
            1 << (seq_len - 1).bit_length(), tables if all(tables) else ()
        )
        return min(1 + most, seq_len, self.num_documents)

    def disordered(self, document: int) -> ConfigError:
        """Return the error for documents that are not in the order of their tokens."""
        before = self.document_offsets.documents_before
        number = int(np.searchsorted(before[1:-1], document, side="right"))
        file = documents_file(self.parts[number].name) if self.parts else ""
        rule = f"{self.path / file} is not in order at document {document - before[number]:,}"
        return _damaged(self.path, rule)

    def begins_with(self, ids: Sequence[int]) -> bool:
        """Return whether documents start with these ids, from the first few documents."""
        starts = self.document_offsets[: min(LOOKED_AT, self.num_documents)]
        return all(self.tokens[i : i + len(ids)].tolist() == list(ids) for i in starts)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return stretches of tokens: int32 [N, length].

        Args:     starts: int64 [N], first tokens; start + length is at most num_tokens.
        """
        return self.tokens.windows(starts, length).astype(np.int32)

    def place(self, token: int) -> str:
        """Return the place of a token, for an error."""
        return self.tokens.place(token)


def _map(folder: Path, name: str, dtype: np.dtype, part: Part, sha256: str) -> WindowedArray:
    """Map a file with a number for each token of a part."""
    path, expected = folder / name, part.num_tokens * dtype.itemsize
    if stored := STORED.get(folder):
        return stored.array(name, dtype, expected, sha256)
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise _damaged(folder, f"{path} {state}, but {META_FILE} records {expected:,} bytes")
    return FileArray(path, dtype, part.num_tokens)


def _map_targets(folder: Path, parts: Sequence[Part]) -> Joined:
    byte = np.dtype(np.uint8)
    return Joined([_map(folder, targets_file(p.name), byte, p, p.targets_sha256) for p in parts])


def _map_offsets(folder: Path, part: Part) -> SortedFile:
    path = folder / documents_file(part.name)
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("another version of NumPy's format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            header_bytes = file.tell()
    except Exception as error:  # for a damaged header, NumPy raises errors of several kinds
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # which may be transient
        raise _damaged(folder, f"{path} cannot be read ({error})") from error
    if shape != (part.num_documents + 1,) or dtype != np.int64:
        expected = f"int64 [{part.num_documents + 1}]"
        raise _damaged(folder, f"{path} has {dtype} {list(shape)}, not {expected}")
    offsets = SortedFile(path, np.dtype("<i8"), shape[0], header_bytes)
    if (offsets[0], offsets[-1]) != (0, part.num_tokens):
        ends = f"{offsets[0]:,} to {offsets[-1]:,}"
        raise _damaged(folder, f"{path} runs from {ends}, not from 0 to {part.num_tokens:,}")
    return offsets


def _damaged(folder: Path, rule: str) -> ConfigError:
    fix = f"copy the folder again, or prepare it again with `{PREPARE} {folder} --overwrite`"
    return ConfigError("data.path", str(folder), rule, fix)
