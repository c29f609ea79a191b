"""The arrays of a checkpoint one by one, by name, without Orbax: to read or write them in pieces.

Orbax keeps zarr3 arrays in a key-value store of TensorStore; "params/layers/wq" lies under
"params.layers.wq". Orbax reads whole shards; with TensorStore itself no more than a box is ever in
memory.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import grid

#: What marks the folder of a checkpoint that holds its arrays.
MANIFEST = "manifest.ocdbt"

#: What Orbax calls the kinds of leaves that are stored as arrays.
ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def array_folder(step_folder: Path) -> Path:
    """The folder of a checkpoint that holds its arrays.

    Raises:   FileNotFoundError when there is none.
    """
    found = sorted(path.parent for path in step_folder.glob(f"*/{MANIFEST}"))
    if not found:
        raise FileNotFoundError(f"{step_folder} has no {MANIFEST}")
    return found[0]


def array_spec(store: Path, name: str) -> dict[str, Any]:
    """What TensorStore opens an array with.

    Args:     store: of `array_folder`. name: as in `fingerprint.named_leaves`.
    """
    path = name.replace("/", ".")
    base = {"driver": "ocdbt", "base": f"file://{store}/", "path": f"{path}/"}
    return {"driver": "zarr3", "kvstore": base}


def open_array(step_folder: Path, name: str) -> Any:
    """An array of a checkpoint, to read.

    Raises:   ValueError when it is not there, or what describes it is damaged.
    """
    return tensorstore.open(array_spec(array_folder(step_folder), name), read=True).result()


def array_names(step_folder: Path) -> list[str]:
    """The names of all arrays, as Orbax lists them beside what has none, such as empty states."""
    tree = json.loads((array_folder(step_folder) / "_METADATA").read_text())["tree_metadata"]
    arrays = (node for node in tree.values() if node["value_metadata"]["value_type"] in ARRAYS)
    keys = ([str(key["key"]) for key in node["key_metadata"]] for node in arrays)
    return sorted("/".join(path) for path in keys)


def num_bytes(array: Any) -> int:
    """Bytes of an array, as it is in memory."""
    return math.prod(array.shape) * array.dtype.numpy_dtype.itemsize


def pieces(array: Any):
    """The boxes in which an array is stored: a read takes whole ones."""
    return grid(tuple(array.shape), tuple(array.chunk_layout.read_chunk.shape or array.shape))


def fingerprint_of(array: Any) -> str:
    """An array's fingerprint, read piece by piece."""
    running = RunningFingerprint(array.shape)
    for box in pieces(array):
        running.add(np.asarray(array[box].read().result()), [part.start for part in box])
    return str(running)
