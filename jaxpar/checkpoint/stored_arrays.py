"""Single arrays of a checkpoint, by name and chunk by chunk, without Orbax.

Orbax stores zarr3 arrays in a key-value store of TensorStore: "params/layers/wq" under the key
"params.layers.wq". Orbax reads full shards. Used directly, TensorStore keeps no more than one chunk
in memory.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jaxpar.checkpoint import integrity
from jaxpar.config.json_reader import read_json_object
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import grid

#: The file that marks the folder of a checkpoint's arrays.
MANIFEST = "manifest.ocdbt"

#: Orbax's names of the kinds of leaves that are stored as arrays.
ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def array_folder(step_folder: Path) -> Path:
    """Return the folder of a checkpoint's arrays.

    Raises:   FileNotFoundError when there is none.
    """
    for name in sorted(os.listdir(step_folder)):  # `glob` would hide a folder that is not readable
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (step_folder / name / MANIFEST).stat()
            return step_folder / name
    raise FileNotFoundError(f"{step_folder} has no {MANIFEST}")


def array_spec(store: Path, name: str) -> dict[str, Any]:
    """Return the TensorStore spec of an array.

    Args:     store: from `array_folder`. name: as in `fingerprint.named_leaves`.
    """
    path = name.replace("/", ".")
    # Not a URL, in which %, ?, # and | of a folder's name would have a meaning.
    files = {"driver": "file", "path": f"{store}/"}
    base = {"driver": "ocdbt", "base": files, "path": f"{path}/"}
    return {"driver": "zarr3", "kvstore": base}


def open_array(step_folder: Path, name: str) -> Any:
    """Open an array of a checkpoint for reading.

    Raises:   ValueError when it is missing, or its metadata is damaged.
    """
    return tensorstore.open(array_spec(array_folder(step_folder), name), read=True).result()


def array_names(step_folder: Path) -> list[str]:
    """Return the names of all arrays. Orbax's list also has entries without one: empty states."""
    tree = read_json_object(array_folder(step_folder) / "_METADATA")["tree_metadata"]
    arrays = (node for node in tree.values() if node["value_metadata"]["value_type"] in ARRAYS)
    keys = ([str(key["key"]) for key in node["key_metadata"]] for node in arrays)
    return sorted("/".join(path) for path in keys)


def num_bytes(array: Any) -> int:
    """Return the size of an array in memory, in bytes."""
    return math.prod(array.shape) * array.dtype.numpy_dtype.itemsize


def pieces(array: Any):
    """Return the index boxes of an array's chunks. A read loads complete chunks."""
    return grid(tuple(array.shape), tuple(array.chunk_layout.read_chunk.shape or array.shape))


def fingerprint_of(array: Any) -> str:
    """Compute an array's fingerprint, reading it chunk by chunk."""
    running = RunningFingerprint(array.shape)
    for box in pieces(array):
        running.add(np.asarray(array[box].read().result()), [part.start for part in box])
    return str(running)


def reason(step_folder: Path, error: Exception) -> str:
    """Summarize an error in one line. Raises:   Unreadable for an error of the machine."""
    integrity.refuse_trouble(str(step_folder), error)
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


@contextlib.contextmanager
def reading(place: Path, what: str) -> Iterator[None]:
    """Convert errors of reading. Raises:   Damaged with a description; or Unreadable."""
    try:
        yield
    except Exception as error:
        raise integrity.Damaged(str(place), [f"{what} ({reason(place, error)})"]) from error
