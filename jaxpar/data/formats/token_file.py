"""Token files of other programs, and one pass over such a file."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import FileArray, WindowedArray
from jaxpar.data.formats.identity import StreamHash
from jaxpar.data.formats.meta import MAX_VOCAB_SIZE
from jaxpar.runtime.files import atomic

#: Tokens to read at a time.
CHUNK_TOKENS = 1 << 22

#: Batches are int32.
MAX_TOKEN = 2**31 - 1


class Hints(NamedTuple):
    """What is known of tokens whose file does not tell their dtype."""

    dtype: str | None = None
    """As set with data.token_dtype, or --dtype."""
    vocab_size: int = 0
    """The model's; 0 if it is not known."""

    def dtype_of(self, path: Path) -> np.dtype:
        """Return the dtype that was set, or else the smallest that holds the vocabulary.

        Raises:   ConfigError("data.path", ...) if neither is known.
        """
        if self.dtype is None and not self.vocab_size:
            rule = f"{path} does not tell the dtype of its tokens"
            fix = "set --data.token-dtype uint32, or uint16"
            raise ConfigError("data.path", str(path), rule, fix)
        return np.dtype(self.dtype or np.min_scalar_type(self.vocab_size - 1)).newbyteorder("<")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of a file, whose header has been checked against its size."""

    path: Path
    tokens: WindowedArray
    document_offsets: np.ndarray | None
    """int64 [documents + 1], increasing from 0 to the tokens. None: documents are not marked."""
    rows: bool = False
    """Whether these are only rows, which are documents unless the end of text is among them."""
    guessed: bool = False
    """Whether nothing in the file tells the dtype."""
    targets: WindowedArray | None = None
    """uint8, 1 for tokens in the loss. None: all."""
    cached: bool = True
    """Whether a change of the tokens is seen in the file at `path`."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


def tokens_of(path: Path, dtype: np.dtype, header_bytes: int = 0) -> FileArray:
    """Return the tokens of a file from a byte to its end."""
    length = (path.stat().st_size - header_bytes) // dtype.itemsize
    return FileArray(path, dtype, length, header_bytes)


@dataclass(frozen=True, eq=False)
class Scan:
    """The results of a pass over all tokens of a file."""

    largest: int
    largest_at: int
    """Index of its first occurrence."""
    identity: str
    """`StreamHash` of the tokens."""
    eos_at: np.ndarray
    """int64: indices of end-of-text tokens; empty without an eos_id."""


def scan(file: TokenFile, eos_id: int | None, pieces: int, *, again: bool = False) -> Scan:
    """Scan all tokens of a file. The result is cached until the file changes.

    Args:     pieces: of the file that are compared to notice a change.
              again: read the complete file even if the result is cached.
    Raises:   ConfigError("data.path", ...) for a negative token, and for 16-bit tokens that look
              like 32-bit ones. Such results are not cached.
    """
    asked = type(file.tokens).__name__, file.tokens.dtype.str, file.num_tokens, eos_id, VERSION
    name = identity(file.path, *asked, pieces=pieces)
    again = again or not file.cached
    kept = None if again else _of_this_process.get(name) or recall(name)
    found = kept if isinstance(kept, Scan) else Scan(**kept) if kept else _read(file, eos_id)
    _of_this_process[name] = found
    if kept is None and file.cached:
        keep(name, vars(found))
    return found


#: Increased when the pass computes other results.
VERSION = 2

_of_this_process: dict[str, Scan] = {}


def _read(file: TokenFile, eos_id: int | None) -> Scan:
    """Read all tokens of a file."""
    digest = StreamHash()
    largest, largest_at, odd = -1, 0, 0
    ends: list[np.ndarray] = []
    for start, chunk in chunks(file.tokens):
        if chunk.dtype.kind == "i" and chunk.min() < 0:
            at = int(np.argmax(chunk < 0))
            rule = f"{file.tokens.place(start + at)} is {chunk[at]}, but tokens cannot be negative"
            raise ConfigError("data.path", str(file.path), rule, "copy the file again")
        if (most := int(chunk.max())) > largest:
            largest, largest_at = most, start + int(np.argmax(chunk))
        if largest > MAX_TOKEN or (file.guessed and largest >= MAX_VOCAB_SIZE):
            place, bits = file.tokens.place(largest_at), 8 * file.tokens.dtype.itemsize
            rule = f"{place} is {largest:,}, which no vocabulary has"
            fix = (
                "copy the file again"
                + f", or set --data.token-dtype uint{bits // 2}" * file.guessed
            )
            raise ConfigError("data.path", str(file.path), rule, fix)
        digest.update(chunk)
        if file.guessed:
            odd = max(odd, int(chunk[1::2].max(initial=0)))
        if eos_id is not None:
            ends.append(start + np.flatnonzero(chunk == eos_id))
    # The high halves of 32-bit tokens are below 16 in vocabularies of up to 2^20.
    few = 15 if file.num_tokens >= 64 else 0
    if file.guessed and largest > odd <= few and file.num_tokens > 1:
        bits = 8 * file.tokens.dtype.itemsize
        high = f"at most {odd}" if odd else "0"
        wider = 2 * bits
        rule = f"every second {bits}-bit number of {file.path} is {high}: it has {wider}-bit tokens"
        fix = f"set --data.token-dtype {'int64' if wider == 64 else f'uint{wider}'}"
        raise ConfigError("data.path", str(file.path), rule, fix)
    eos_at = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    return Scan(largest, largest_at, digest.hex(), eos_at)


class Sliced(Protocol):
    """An array of which stretches can be read."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> np.ndarray: ...


def chunks(tokens: Sliced) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks of an array of tokens in order, each with the index of its first token."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, np.ascontiguousarray(tokens[start : start + CHUNK_TOKENS])


def offsets_from(eos_at: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the document offsets of tokens, in which each end of text ends a document.

    Args:     eos_at: int64, increasing: indices of end-of-text tokens.
    Returns:  int64 [documents + 1], increasing from 0 to num_tokens.
    """
    return np.unique(np.concatenate([[0], eos_at + 1, [num_tokens]]).astype(np.int64))


# ----------------------------- Cache the results of a pass over a token file until the file changes
#
# The pass hashes and checks every token, at 0.3 to 0.7 GB/s (docs/data.md), which would take
# minutes at each start for large files. The results are stored in the user's cache folder under the
# file's identity: path, size, modification times, and a hash of pieces of the file. A modified file
# has other times, even with the same size; the pieces are for file systems with unreliable times.
# If the folder is deleted, the next start repeats the pass.


#: Pieces to hash at each start, including the first and last bytes: 1 MiB in total, or 64 KiB of
#: each of many files.
PIECES, FEWEST_PIECES, PIECE_BYTES = 256, 16, 4096

type Found = dict[str, Any]


def folder() -> Path:
    """Return the cache folder, jaxpar/tokens in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxpar" / "tokens"


def identity(path: Path, *more: Any, pieces: int = PIECES) -> str:
    """Return a cache key for the current state of a file.

    Args:     more: other JSON values that the results depend on. pieces: of the file to hash.
    """
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns
    about = [
        str(path.resolve()),
        stat.st_size,
        times,
        stat.st_ino,
        sampled_hash(path, stat.st_size, pieces),
    ]
    return hashlib.sha256(json.dumps([*about, *more]).encode()).hexdigest()


def sampled_hash(path: Path, size: int, pieces: int = PIECES) -> str:
    """Return a hash of evenly spaced pieces of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for at in np.linspace(0, max(size - PIECE_BYTES, 0), pieces, dtype=np.int64):
            file.seek(int(at))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def recall(name: str) -> Found | None:
    """Return cached arrays and strings by name, or None if they are not cached."""
    try:
        with np.load(folder() / f"{name}.npz", allow_pickle=False) as kept:
            return {key: kept[key] if kept[key].ndim else kept[key].item() for key in kept.files}
    except Exception:  # ignore a damaged file, for which NumPy and zipfile raise various errors
        return None


def keep(name: str, found: Found) -> None:
    """Cache arrays and strings; do nothing if the cache cannot be written."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with atomic.new_file(folder() / f"{name}.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **found)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return
