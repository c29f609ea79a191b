"""The shards of a checkpoint that each process saves to its own folder.

Orbax writes what a process has to `ocdbt.process_N`, and then an index of it: a key-value store of
TensorStore, whose nodes name the files of arrays. Where processes share no folder, each has an
index of its own shards. The index of the whole checkpoint has the keys of all of them. It names the
same files, so that no array is copied, and none needs to be read.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.saved import METADATA
from jaxpar.checkpoint.stored_arrays import MANIFEST
from jaxpar.config.json_reader import read_json_object
from jaxpar.stores.objects import Content
from jaxpar.stores.shards import ShardLayout

#: The files of arrays that a process writes, each with 128 random bits in its name.
_ARRAYS = re.compile(r"[^/]+/ocdbt\.process_\d+/d/[^/]+")

#: Files of a process that mean nothing in the whole checkpoint: its own list of files, Orbax's mark
#: of a finished save, and the store of its arrays, which the index replaces.
_LEFT_OUT = re.compile(
    rf"{re.escape(integrity.FILES)}|(.*/)?commit_success\.txt|.*/ocdbt\.process_.*"
)

#: A file in the folder of indices while they are joined.
_INDICES = ".indices"


def identity(step_folder: Path) -> str:
    """Return a digest of the fingerprints of all arrays of the checkpoint, its own and others.

    Raises:   FileNotFoundError; ValueError if the metadata has none.
    """
    about = read_json_object(step_folder / METADATA).get("custom_metadata")
    found = about.get(integrity.FINGERPRINTS) if isinstance(about, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{step_folder / METADATA} has no fingerprints")
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def is_array(name: str) -> bool:
    """Whether a file of a checkpoint, by its name, holds arrays."""
    return _ARRAYS.fullmatch(name) is not None


def join(
    shards: Sequence[Mapping[str, bytes]], arrays: Mapping[str, Content], step_folder: Path
) -> None:
    """Write the small files of a whole checkpoint, with the list of all its files.

    Args:     shards: the small files of each process, by rank. arrays: the files of arrays, which
              are elsewhere. step_folder: new.
    Raises:   ValueError if the shards have no index, or one that cannot be read; OSError.
    """
    indices = step_folder / _INDICES
    places = set[Path]()
    for rank, files in enumerate(shards):
        for name, content in files.items():
            if name.count("/") == 1 and name.endswith(f"/{MANIFEST}"):
                places.add(step_folder / Path(name).parent)
                _write(indices / str(rank) / MANIFEST, content)
            elif not _LEFT_OUT.fullmatch(name) and not (step_folder / name).exists():
                _write(step_folder / name, content)
    found = [indices / str(rank) for rank in range(len(shards))]
    if len(places) != 1 or not all((one / MANIFEST).is_file() for one in found):
        raise ValueError("a process has no index of its shards")
    (place,) = places
    _join_indices(found, place)
    shutil.rmtree(indices)
    integrity.write_file_list(step_folder, {name: one._asdict() for name, one in arrays.items()})


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _join_indices(indices: list[Path], place: Path) -> None:
    """Write the index of a folder of arrays, from others whose nodes are in it.

    Args:     indices: folders, each with the manifest of an index. place: has the nodes of all.
    Raises:   ValueError.
    """
    context = tensorstore.Context()  # of all: keys are not copied between two

    def opened(manifest: Path) -> Any:
        files = {"driver": "file", "path": f"{place}/"}
        spec = {"driver": "ocdbt", "base": files, "manifest": files | {"path": f"{manifest}/"}}
        return tensorstore.KvStore.open(spec, context=context).result()

    whole = opened(place)
    transaction = tensorstore.Transaction(atomic=True)
    copies = [
        opened(one).experimental_copy_range_to(whole.with_transaction(transaction))
        for one in indices
    ]
    for copy in copies:
        copy.result()
    transaction.commit_sync()


#: What `stores` needs to know of shards.
LAYOUT = ShardLayout(identity, is_array, join)
