"""Megatron's `.bin` and `.idx` pair: tokens without a header, and their index.

An index is little-endian, with these contents in order:
    9 bytes     MMIDIDX, two zero bytes
    uint64      version, 1
    uint8       code of the tokens' dtype
    uint64      sequences
    uint64      document indices, which are one more than the documents
    int32       [sequences] tokens in each
    int64       [sequences] byte in the .bin file at which each starts
    int64       [document indices] first sequence of each document, then the number of sequences
    int8        [sequences] modes; in multimodal data only

Source:   `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
"""

import struct
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.token_file import Hints, TokenFile, tokens_of

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1

#: Magic, version, dtype code, sequences, document indices.
HEADER = struct.Struct("<9sQBQQ")

#: Codes of integer dtypes. 6 and 7 are floating point.
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

#: Megatron stores smaller vocabularies in 16 bits.
WIDE_VOCABULARY = 65500

#: A sequence's length is an int32.
MAX_DOCUMENT_TOKENS = 2**31 - 1


def index_of(path: Path) -> Path | None:
    """Return the index for a path to an index, a .bin file or a prefix; None if there is none."""
    if path.suffix == ".idx":
        return path if path.is_file() else None
    stem = path.with_suffix("") if path.suffix == ".bin" else path
    index = stem.with_name(f"{stem.name}.idx")
    return index if index.is_file() else None


def read(index: Path, hints: Hints) -> TokenFile:
    """Open a pair by its index, and check the index against the .bin file.

    Raises:   ConfigError("data.path", ...) that names the file and the byte of the problem.
    """
    dtype, lengths, pointers, documents = _read_index(index)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    wrong = np.flatnonzero(pointers != ends[:-1] * dtype.itemsize)
    if wrong.size:
        i = int(wrong[0])
        at = HEADER.size + lengths.nbytes + 8 * i
        expected = f"at the end of the one before, {ends[i] * dtype.itemsize:,}"
        raise _broken(index, at, f"sequence {i} starts at byte {pointers[i]:,}, not {expected}")
    tokens = index.with_suffix(".bin")
    found = tokens.stat().st_size if tokens.is_file() else None
    if found != (expected_bytes := int(ends[-1]) * dtype.itemsize):
        state = "is missing" if found is None else f"ends at byte {found:,}"
        rule = f"{tokens} {state}, but {index} records {expected_bytes:,} bytes"
        raise ConfigError("data.path", str(index), rule, "copy both files again")
    return TokenFile(tokens, tokens_of(tokens, dtype), np.unique(ends[documents]))


def _read_index(index: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise _broken(index, size, f"ends inside its header of {HEADER.size} bytes")
    magic, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if magic != MAGIC:
        raise _broken(index, 0, f"starts with {magic!r}, not Megatron's {MAGIC!r}")
    if version != VERSION:
        raise _broken(index, 9, f"has version {version}, not {VERSION}")
    if code not in DTYPES:
        raise _broken(index, 17, f"has dtype code {code}, which is not an integer dtype")
    if num_sequences == 0 or num_indices < 2:
        raise _broken(index, 18, f"has {num_sequences} sequences and {num_indices} indices: empty")
    needed = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size not in (needed, needed + num_sequences):
        rule = f"has {size:,} bytes, but its header requires {needed:,}"
        raise _broken(index, min(size, needed), rule)
    at = np.memmap(index, np.uint8, "r")
    first, second = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
    lengths = at[HEADER.size : first].view("<i4")
    documents = at[second:needed].view("<i8")
    _check_lengths(index, lengths)
    if not lengths.any():
        raise _broken(index, HEADER.size, "has only empty sequences")
    _check_documents(index, documents, num_sequences, second)
    return np.dtype(DTYPES[code]), lengths, at[first:second].view("<i8"), documents


def _check_lengths(index: Path, lengths: np.ndarray) -> None:
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        i = int(negative[0])
        raise _broken(index, HEADER.size + 4 * i, f"sequence {i} has {lengths[i]} tokens")


def _check_documents(index: Path, documents: np.ndarray, num_sequences: int, start: int) -> None:
    if documents[0] != 0:
        raise _broken(index, start, f"the first document starts at sequence {documents[0]}, not 0")
    backwards = np.flatnonzero(np.diff(documents) < 0)
    if backwards.size:
        i = int(backwards[0]) + 1
        rule = f"document {i} starts at sequence {documents[i]}, before the one before it"
        raise _broken(index, start + 8 * i, rule)
    if documents[-1] != num_sequences:
        at = start + documents.nbytes - 8
        rule = f"documents end at sequence {documents[-1]}, but there are {num_sequences}"
        raise _broken(index, at, rule)


def _broken(index: Path, at: int, rule: str) -> ConfigError:
    fix = "copy the .idx file again, or build it again with Megatron"
    return ConfigError("data.path", str(index), f"{index}, byte {at:,}: {rule}", fix)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which Megatron stores a vocabulary."""
    return np.dtype("<u2" if vocab_size < WIDE_VOCABULARY else "<i4")


def index_bytes(dtype: np.dtype, document_offsets: np.ndarray) -> bytes:
    """Return an index with one sequence per document, as from Megatron's preprocessing.

    Args:     document_offsets: int64 [documents + 1], increasing from 0 to the number of tokens.
    """
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    lengths = np.diff(document_offsets)
    if lengths.max(initial=0) > MAX_DOCUMENT_TOKENS:
        rule = f"allows {MAX_DOCUMENT_TOKENS:,} tokens per document, not {lengths.max():,}"
        raise ConfigError("--to", "megatron", rule, "use --to jaxpar")
    parts = [
        HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1),
        lengths.astype("<i4").tobytes(),
        (document_offsets[:-1] * dtype.itemsize).astype("<i8").tobytes(),
        np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
    ]
    return b"".join(parts)
