"""datatrove's `.ds` files, which nanotron reads: tokens without a header.

Beside NAME.ds may be, little-endian:
    NAME.ds.index     uint64 [documents]: tokens up to the end of each document
    NAME.ds.metadata  the tokenizer, "|", and bytes of a token; below it, the number of tokens
    NAME.ds.loss      a byte for each token, 1 if it is in the loss

Source:   `datatrove/pipeline/tokens/tokenizer.py`.
"""

import re
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.arrays import FileArray
from jaxpar.data.formats.token_file import Hints, TokenFile, tokens_of

#: Bytes of a token.
SIZES = (2, 4)


def find(path: Path) -> Path | None:
    """Return a path if it is a .ds file; None otherwise."""
    return path if path.suffix == ".ds" and path.is_file() else None


def read(path: Path, hints: Hints) -> TokenFile | None:
    """Open a .ds file, and check it against its companion files. None: it has no tokens.

    Raises:   ConfigError("data.path", ...) that names the file and the byte of the problem.
    """
    size, index, loss = path.stat().st_size, _beside(path, "index"), _beside(path, "loss")
    ends = _read_index(index) if index.is_file() else None
    if size == 0 and (ends is None or ends[-1] == 0):
        return None
    dtype = _dtype(path, size, ends, hints)
    if size % dtype.itemsize:
        raise _broken(path, size, f"ends inside a token of {dtype.itemsize} bytes")
    tokens, targets = tokens_of(path, dtype), None
    if loss.is_file():
        if loss.stat().st_size != len(tokens):
            rule = f"has {loss.stat().st_size:,} bytes, but there are {len(tokens):,} tokens"
            raise _broken(loss, min(loss.stat().st_size, len(tokens)), rule)
        targets = FileArray(loss, np.dtype(np.uint8), len(tokens))
    offsets = None if ends is None else np.unique(ends)
    return TokenFile(path, tokens, offsets, targets=targets)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _read_index(index: Path) -> np.ndarray:
    """Return the ends of documents after a 0: int64 [documents + 1]."""
    if rest := index.stat().st_size % 8:
        raise _broken(index, index.stat().st_size - rest, "ends inside a number")
    ends = np.concatenate([[0], np.fromfile(index, "<i8")])
    falls = np.flatnonzero(np.diff(ends) < 0)
    if falls.size:
        at = int(falls[0])
        rule = f"document {at} ends at token {ends[at + 1]:,}, but starts at {ends[at]:,}"
        raise _broken(index, 8 * at, rule)
    return ends


def _dtype(path: Path, size: int, ends: np.ndarray | None, hints: Hints) -> np.dtype:
    """Return the dtype of the tokens: by the index, or else by the metadata, or else the hints."""
    if ends is not None:
        sizes = [n for n in SIZES if n * ends[-1] == size]
        if not sizes:
            rule = f"documents end at token {ends[-1]:,}, but {path} has {size:,} bytes"
            raise _broken(_beside(path, "index"), max(8 * len(ends) - 16, 0), rule)
        return np.dtype(f"<u{sizes[0]}")
    about = _beside(path, "metadata")
    if not about.is_file():
        return hints.dtype_of(path)
    found = re.match(rb"[^\n]*\|([24])\n(\d+)\b", about.read_bytes()[:4096])
    if found is None or int(found[1]) * int(found[2]) != size:
        rule = f"records other bytes of a token, or other tokens, than {path} has in {size:,} bytes"
        raise _broken(about, 0, rule)
    return np.dtype(f"<u{int(found[1])}")


def _broken(path: Path, at: int, rule: str) -> ConfigError:
    fix = "copy the .ds file and its companion files again"
    return ConfigError("data.path", str(path), f"{path}, byte {at:,}: {rule}", fix)
