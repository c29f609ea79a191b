"""What one pass over a file of tokens found, kept until the file changes.

The pass hashes and checks every token, at 0.3 to 0.7 GB/s (docs/data.md); for large files that is
minutes, at each start of a run. What it found is kept in the user's cache folder under the file's
identity: path, size, times of change, and a hash of pieces from all over it. A file that was
written to has other times, whatever its size; the pieces are for file systems whose times cannot
be relied on. Deleting the folder costs the next start a pass.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

#: Pieces that are hashed at each start, first and last bytes among them: 1 MiB in all.
PIECES, PIECE_BYTES = 256, 4096

type Found = dict[str, Any]


def folder() -> Path:
    """Where findings are kept: jaxpar/tokens in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxpar" / "tokens"


def identity(path: Path, *more: Any) -> str:
    """A name for a file as it is now, and for what is asked about it.

    Args:     more: JSON values that the findings depend on too.
    """
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns
    about = [str(path.resolve()), stat.st_size, times, stat.st_ino, _pieces(path, stat.st_size)]
    return hashlib.sha256(json.dumps([*about, *more]).encode()).hexdigest()


def _pieces(path: Path, size: int) -> str:
    """Hash of pieces that lie evenly over a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for at in np.linspace(0, max(size - PIECE_BYTES, 0), PIECES, dtype=np.int64):
            file.seek(int(at))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def recall(name: str) -> Found | None:
    """Arrays and strings by name, as they were kept under an identity; None if they were not."""
    try:
        with np.load(folder() / f"{name}.npz", allow_pickle=False) as kept:
            return {key: kept[key] if kept[key].ndim else kept[key].item() for key in kept.files}
    except Exception:  # A damaged file is none, and NumPy and zipfile raise what they like.
        return None


def keep(name: str, found: Found) -> None:
    """Keep arrays and strings under an identity; where nothing can be written, do without."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **found)
            os.replace(temporary, folder() / f"{name}.npz")
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return
