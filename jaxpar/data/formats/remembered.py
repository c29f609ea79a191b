"""Cache the results of a pass over a token file until the file changes.

The pass hashes and checks every token, at 0.3 to 0.7 GB/s (docs/data.md), which would take minutes
at each start for large files. The results are stored in the user's cache folder under the file's
identity: path, size, modification times, and a hash of pieces of the file. A modified file has
other times, even with the same size; the pieces are for file systems with unreliable times. If the
folder is deleted, the next start repeats the pass.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.runtime.files import atomic

#: Pieces to hash at each start, including the first and last bytes: 1 MiB in total.
PIECES, PIECE_BYTES = 256, 4096

type Found = dict[str, Any]


def folder() -> Path:
    """Return the cache folder, jaxpar/tokens in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxpar" / "tokens"


def identity(path: Path, *more: Any) -> str:
    """Return a cache key for the current state of a file.

    Args:     more: other JSON values that the results depend on.
    """
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns
    about = [
        str(path.resolve()),
        stat.st_size,
        times,
        stat.st_ino,
        sampled_hash(path, stat.st_size),
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
