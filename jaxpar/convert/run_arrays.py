"""The parameters of a checkpoint, a box at a time: read from any run, and written into a new one.

A run's checkpoints are Orbax's (`checkpoint.py`): zarr3 arrays in a key-value store of TensorStore,
one for each parameter, under "params.layers.wq". Orbax reads and writes whole shards; here a
checkpoint is opened with TensorStore itself, so that no more than a box is ever in memory.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar import checkpoint
from jaxpar.config import Config
from jaxpar.convert.layout import Box
from jaxpar.model.transformer import param_specs
from jaxpar.params import flat, map_specs

#: What marks the folder of a checkpoint that holds its arrays.
MANIFEST = "manifest.ocdbt"

#: Steps of a checkpoint of imported weights.
IMPORTED_STEP = 0


class RunArrays:
    """The parameters of a checkpoint by path, to be read or written box by box."""

    def __init__(self, arrays: dict[str, Any]):
        self.by_path = arrays

    def chunk(self, path: str) -> tuple[int, ...]:
        """The shape of the pieces in which a parameter is stored: a read takes whole pieces."""
        return tuple(self.by_path[path].chunk_layout.read_chunk.shape)

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self.by_path[path].shape)

    def read(self, path: str, box: Box) -> np.ndarray:
        """The float32 numbers of a box."""
        return self.by_path[path][box].read().result()

    def write(self, path: str, box: Box, values: np.ndarray) -> None:
        """Put numbers into a box, on disk when this returns."""
        self.by_path[path][box].write(values).result()


def open_run(run_dir: str | Path, cfg: Config, step: int) -> RunArrays:
    """The parameters of a checkpoint, adapters among them.

    Raises:   ValueError when one is not there.
    """
    store = _store(checkpoint.folder(run_dir) / str(step))
    arrays = {}
    for path in flat(param_specs(cfg.model, cfg.lora)):
        try:
            arrays[path] = tensorstore.open(_spec(store, path), read=True).result()
        except ValueError as error:
            raise ValueError(f"step {step} of {run_dir} lacks {path}") from error
    return RunArrays(arrays)


def create_run(
    run_dir: Path, cfg: Config, chunks: dict[str, tuple[int, ...]], about: dict[str, Any]
) -> RunArrays:
    """A run with one checkpoint of parameters alone, to be filled.

    Orbax writes the checkpoint, with a single number in place of each array, so that all that it
    keeps beside them is its own; then each array gets its shape and chunks.

    Args:     chunks: shape of the pieces of each parameter, by path.
              about: fields of `checkpoint.Saved`.
    """
    specs = param_specs(cfg.model, cfg.lora)
    small = map_specs(lambda spec: jnp.zeros((1,) * len(spec.shape), jnp.float32), specs)
    context = ocp.Context()
    context.array.saving.use_compression = False
    with ocp.training.Checkpointer(checkpoint.folder(run_dir), context=context) as orbax:
        tree = {"step": jnp.int32(IMPORTED_STEP), "params": small}
        orbax.save(IMPORTED_STEP, tree, force=True, custom_metadata=about)
    store = _store(checkpoint.folder(run_dir) / str(IMPORTED_STEP))
    shapes = {path: spec.shape for path, spec in flat(specs).items()}
    _tell_shapes(store, shapes, chunks)
    arrays = {}
    for path, shape in shapes.items():
        metadata = {
            "shape": shape,
            "data_type": "float32",
            "fill_value": 0.0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks[path]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        # Orbax takes a chunk that is not stored for a damaged one, zeros or not.
        spec = _spec(store, path) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
        arrays[path] = tensorstore.open(spec, create=True, delete_existing=True).result()
    return RunArrays(arrays)


def about_import(cfg: Config) -> dict[str, Any]:
    """What a checkpoint of imported weights says about itself: no data, and nothing trained."""
    return {
        "config": dataclasses.asdict(cfg),
        "dataset": checkpoint.NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }


def _store(step_folder: Path) -> Path:
    """The folder of a checkpoint that holds its arrays."""
    return next(path.parent for path in sorted(step_folder.glob(f"*/{MANIFEST}")))


def _spec(store: Path, path: str) -> dict[str, Any]:
    name = ".".join(["params", *path.split("/")])
    base = {"driver": "ocdbt", "base": f"file://{store}/", "path": f"{name}/"}
    return {"driver": "zarr3", "kvstore": base}


def _tell_shapes(store: Path, shapes: dict[str, tuple], chunks: dict[str, tuple]) -> None:
    """Put the arrays' shapes where Orbax has noted those of the single numbers."""
    names = {".".join(["params", *path.split("/")]): path for path in shapes}
    for file in (store / "array_metadatas").iterdir():
        notes = json.loads(file.read_text())
        for note in notes["array_metadatas"]:
            about = note["array_metadata"]
            if about["param_name"] in names:
                about["write_shape"] = about["chunk_shape"] = chunks[names[about["param_name"]]]
        file.write_text(json.dumps(notes))
    tree = json.loads((store / "_METADATA").read_text())
    for node in tree["tree_metadata"].values():
        name = ".".join(key["key"] for key in node["key_metadata"])
        if name in names:
            node["value_metadata"]["write_shape"] = chunks[names[name]]
    (store / "_METADATA").write_text(json.dumps(tree))
