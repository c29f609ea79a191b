"""Writes a checkpoint that holds only weights, box by box: imported ones, or averages.

Orbax writes the checkpoint and its metadata with a single number for each array. Then each array
gets its shape and chunks, and TensorStore its values (`stored_arrays.py`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint import integrity, stored_arrays
from jaxpar.checkpoint.saved import METADATA, checkpoint_folder
from jaxpar.config.json_reader import read_json_object
from jaxpar.sharding.fingerprint import RunningFingerprint

#: The step of such a checkpoint.
STEP = 0


def create(
    run_dir: Path,
    shapes: Mapping[str, tuple[int, ...]],
    chunks: Mapping[str, tuple[int, ...]],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Create a run with one checkpoint of float32 parameters, whose values come later.

    Args:     shapes, chunks: of each parameter, by path. about: fields of `Saved`.
    Returns:  TensorStore arrays by path.
    """
    ones = {path: jnp.zeros((1,) * len(shape), jnp.float32) for path, shape in shapes.items()}
    context = ocp.Context()
    context.array.saving.use_compression = False
    with ocp.training.Checkpointer(checkpoint_folder(run_dir), context=context) as orbax:
        small = flax.traverse_util.unflatten_dict(ones, sep="/")
        tree = {"step": jnp.int32(STEP), "params": small}
        orbax.save(STEP, tree, force=True, custom_metadata=about)
    at = stored_arrays.array_folder(checkpoint_folder(run_dir) / str(STEP))
    _tell_shapes(at, shapes, chunks)
    arrays = {}
    for path, shape in shapes.items():
        metadata = {
            "shape": shape,
            "data_type": "float32",
            "fill_value": 0.0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks[path]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        # Orbax treats a missing chunk as damage, even if all its values are the fill value.
        spec = stored_arrays.array_spec(at, f"params/{path}")
        spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
        arrays[path] = tensorstore.open(spec, create=True, delete_existing=True).result()
    return arrays


def seal(run_dir: Path, about: dict[str, Any], found: Mapping[str, RunningFingerprint]) -> None:
    """Add the fingerprints and the file list to a run of `create`, after it is filled.

    Args:     about: as given to `create`. found: fingerprint of every parameter, by path.
    """
    step_folder = checkpoint_folder(run_dir) / str(STEP)
    step = RunningFingerprint(())
    step.add(np.int32(STEP), ())
    sums = {"step": str(step)} | {f"params/{path}": str(sum_) for path, sum_ in found.items()}
    file = step_folder / METADATA
    metadata = read_json_object(file)
    metadata["custom_metadata"] = integrity.seal(about | {integrity.FINGERPRINTS: sums})
    file.write_text(json.dumps(metadata))
    integrity.write_file_list(step_folder)


def _tell_shapes(
    folder: Path, shapes: Mapping[str, tuple], chunks: Mapping[str, tuple[int, ...]]
) -> None:
    """Write the arrays' shapes into Orbax's metadata, in place of those of the single numbers."""
    names = {".".join(["params", *path.split("/")]): path for path in shapes}
    for file in sorted((folder / "array_metadatas").iterdir()):
        notes = read_json_object(file)
        for note in notes["array_metadatas"]:
            about = note["array_metadata"]
            if about["param_name"] in names:
                about["write_shape"] = about["chunk_shape"] = chunks[names[about["param_name"]]]
        file.write_text(json.dumps(notes))
    tree = read_json_object(folder / "_METADATA")
    for node in tree["tree_metadata"].values():
        name = ".".join(key["key"] for key in node["key_metadata"])
        if name in names:
            node["value_metadata"]["write_shape"] = chunks[names[name]]
    (folder / "_METADATA").write_text(json.dumps(tree))
