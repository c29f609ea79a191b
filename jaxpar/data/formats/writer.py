"""Write dataset folders, which appear only when they are complete."""

import hashlib
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import check_path, is_address
from jaxpar.data.formats.arrays import most_documents
from jaxpar.data.formats.identity import StreamHash
from jaxpar.data.formats.meta import (
    COUNTS_FILE,
    FORMAT,
    META_FILE,
    Meta,
    Part,
    SplitMeta,
    documents_file,
    is_dataset_file,
    meta_to_json,
    targets_file,
    token_dtype,
    tokens_file,
)
from jaxpar.data.formats.readers import Piece
from jaxpar.data.stored import whole_address
from jaxpar.data.tokenizer import NoTokenizer, Tokenizer
from jaxpar.runtime.files import atomic

#: Tokens to buffer before a write, so that counting them by vocabulary is efficient.
FLUSH_TOKENS = 1 << 20


class TextPart(NamedTuple):
    """A part of a text, and its tokens."""

    first: int
    """Characters of the text before it."""
    chars: int
    ids: np.ndarray
    """int32 [tokens]."""


#: Document offsets to buffer before a write.
FLUSH_DOCUMENTS = 1 << 16


class OffsetsWriter:
    """Appends document offsets to a .npy file, whose header is completed at the end."""

    def __init__(self, path: Path):
        self._path, self._held, self._count = path, array("q", [0]), 0
        self._last = np.zeros(0, "<i8")
        #: Of the offsets, and of the lengths of the documents.
        self.sha256, self.hash = hashlib.sha256(), StreamHash()
        with path.open("wb") as file:
            self._write_header(file)

    def append(self, end: int) -> None:
        """Add the end of a document: the tokens up to it."""
        self._held.append(end)
        if len(self._held) >= FLUSH_DOCUMENTS:
            self._flush()

    def extend(self, ends: np.ndarray) -> None:
        """Add the ends of documents: int64, increasing."""
        self._held.frombytes(np.ascontiguousarray(ends, np.int64).tobytes())
        self._flush()

    def close(self) -> np.ndarray:
        """Complete the file. Returns:  int64 [documents + 1], memory-mapped."""
        self._flush()
        with self._path.open("r+b") as file:
            self._write_header(file)
        offsets: np.ndarray = np.load(self._path, mmap_mode="r", allow_pickle=False)
        return offsets

    def _write_header(self, file: BinaryIO) -> None:
        # NumPy leaves space for the digits of any number of elements.
        about = {"descr": "<i8", "fortran_order": False, "shape": (self._count,)}
        np.lib.format.write_array_header_1_0(file, about)

    def _flush(self) -> None:
        offsets = np.array(self._held, "<i8")
        with self._path.open("ab") as file:
            file.write(offsets)
        self.sha256.update(offsets)
        self.hash.update(np.diff(offsets, prepend=self._last))
        self._held, self._count = array("q"), self._count + len(offsets)
        self._last = offsets[-1:] if len(offsets) else self._last


class SplitWriter:
    """Appends documents to a part of a split, and collects the values of its `Part`."""

    def __init__(self, folder: Path, split: str, vocab_size: int, eos_id: int):
        self._folder, self._split, self._eos = folder, split, np.array([eos_id])
        self._dtype = token_dtype(vocab_size)
        self._path = folder / self._file_of(split)
        self._path.touch()
        self._sha256, self._targets_sha256 = hashlib.sha256(), hashlib.sha256()
        self._hash, self._targets_hash = StreamHash(), StreamHash()
        self._held: list[np.ndarray] = []
        self._held_tokens = 0
        self._documents = OffsetsWriter(folder / documents_file(split))
        #: UTF-8 bytes of text so far; 0 if unknown.
        self.num_bytes = 0
        self.num_tokens = 0
        #: Tokens of conversations that are in the loss.
        self.num_targets = 0
        #: Number of occurrences of each token, int64 [vocab_size]; complete once closed.
        self.token_counts = np.zeros(vocab_size, np.int64)

    def append(self, piece: Piece, parts: Sequence[TextPart]) -> None:
        """Add a piece of a document, and the end of text after the last piece.

        Args:     parts: its tokens, in order.
        """
        for part in parts:
            self._hold(part.ids)
        self.num_bytes += len(piece.text.encode("utf-8"))
        if piece.last:
            self._hold(self._eos)
            self._documents.append(self.num_tokens)

    def copy(self, ids: np.ndarray) -> None:
        """Add tokens unchanged, including their ends of text.

        Args:     ids: integers [tokens], none negative.
        """
        self._hold(ids)

    def append_conversation(self, ids: np.ndarray, targets: np.ndarray) -> None:
        """Add a document with targets. Either all documents of a split have targets, or none.

        Args:     ids: integers [tokens].
                  targets: bool [tokens].
        """
        self._hold(ids)
        self._documents.append(self.num_tokens)
        marks = targets.astype(np.uint8)
        with (self._folder / targets_file(self._split)).open("ab") as file:
            file.write(marks.tobytes())
        self._targets_sha256.update(marks)
        self._targets_hash.update(marks)
        self.num_targets += int(targets.sum())

    def end_documents(self, ends: np.ndarray) -> None:
        """Mark the ends of copied documents.

        Args:     ends: int64, increasing: number of tokens in this split up to each end.
        """
        self._documents.extend(ends)

    def close(self) -> Part:
        """Write the buffered tokens and the document offsets."""
        self._flush()
        offsets = self._documents.close()
        return Part(
            name=self._split,
            num_tokens=self.num_tokens,
            num_documents=len(offsets) - 1,
            num_bytes=self.num_bytes,
            sha256=self._sha256.hexdigest(),
            documents_sha256=self._documents.sha256.hexdigest(),
            targets_sha256=self._targets_sha256.hexdigest() if self.num_targets else "",
            tokens_hash=self._hash.hex(),
            documents_hash=self._documents.hash.hex(),
            most_documents=tuple(most_documents(offsets)),
            targets_hash=self._targets_hash.hex() if self.num_targets else "",
        )

    def _hold(self, ids: np.ndarray) -> None:
        self._held.append(ids)
        self._held_tokens += len(ids)
        self.num_tokens += len(ids)
        if self._held_tokens >= FLUSH_TOKENS:
            self._flush()

    @staticmethod
    def _file_of(split: str) -> str:
        """Return the name of the file that `_store` appends to."""
        return tokens_file(split)

    def _store(self, stored: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(stored)

    def _flush(self) -> None:
        if not self._held:
            return
        tokens = np.concatenate(self._held)
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
        stored = tokens.astype(self._dtype).tobytes()
        self._store(stored)
        self._sha256.update(stored)
        self._hash.update(tokens)
        self._held, self._held_tokens = [], 0


def write_meta(
    folder: Path,
    tokenizer: Tokenizer | NoTokenizer,
    counts: np.ndarray,
    splits: Mapping[str, Sequence[Part]],
    **more: Any,
) -> Meta:
    """Write the last files of a folder: the tokenizer, the counts and meta.json.

    Args:     counts: int64 [vocab_size], of each token in the training split. splits: the parts of
              each split. more: other fields of `Meta`.
    Returns:  the contents of meta.json.
    """
    meta = Meta(
        format=FORMAT,
        dtype=token_dtype(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        eos_token=tokenizer.eos_token,
        tokenizer=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        unigram_entropy=unigram_entropy(counts),
        splits={name: SplitMeta(parts=tuple(parts)) for name, parts in splits.items()},
        **more,
    )
    tokenizer.save(folder)
    np.save(folder / COUNTS_FILE, counts)
    (folder / META_FILE).write_text(meta_to_json(meta), "utf-8")
    return meta


def unigram_entropy(token_counts: np.ndarray) -> float:
    """Return the entropy of token frequencies, in nats per token.

    Args:     token_counts: int64 [vocab_size], not all 0.
    """
    p = token_counts[token_counts > 0] / token_counts.sum()
    return float(-np.sum(p * np.log(p)))


@contextmanager
def whole_folder(output: str | Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that is renamed to `output` if the block succeeds, and otherwise deleted.

    Args:     output: may be an address, to which the folder is uploaded. overwrite: replace an
              existing dataset. Other folders are never replaced.
    Raises:   ConfigError("--output", ...) if the output exists, is no path, or cannot be created;
              as `whole_address`.
    """
    if is_address(str(output)):
        with whole_address(str(output), overwrite) as staging:
            yield staging
        return
    check_path("--output", str(output), "use a folder of this computer")
    target = Path(output).expanduser().resolve()
    check_target(target, overwrite)
    staging = atomic.temporary_name(target)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        rule = f"cannot be created: {error.strerror}"
        raise ConfigError("--output", str(output), rule, "use a writable folder") from error
    try:
        yield staging
        check_target(target, overwrite)  # another process may have written it
        replace_folder(target, staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def replace_folder(target: Path, staging: Path) -> None:
    """Rename a complete folder to `target`, in place of a dataset that is there."""
    if not target.exists():
        atomic.publish(staging, target)
        return
    # A folder can only be renamed over an empty one.
    retired = atomic.temporary_name(target)
    atomic.move(target, retired)
    try:
        atomic.publish(staging, target)
    except BaseException:
        atomic.move(retired, target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Raise ConfigError("--output", ...) if a folder exists and must not be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError("--output", str(target), "is a file", "use a folder")
    held = [p.relative_to(target).as_posix() for p in sorted(target.rglob("*")) if not p.is_dir()]
    foreign = [name for name in held if not is_dataset_file(name)]
    if foreign:
        rule = f"contains {foreign[0]!r}, which is not part of a dataset"
        raise ConfigError("--output", str(target), rule, "use a new or empty folder")
    if held and not overwrite:
        fix = "add --overwrite to replace it, or use another folder"
        raise ConfigError("--output", str(target), "already has a dataset", fix)
