"""The parameters of a checkpoint, a box at a time: read from any run, and written into a new one.

No more than a box is ever in memory (`checkpoint/store.py`). What is read or written adds up to the
fingerprints that a checkpoint has of its arrays.
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
from jaxpar.checkpoint import integrity, store
from jaxpar.checkpoint.saved import METADATA
from jaxpar.config import Config
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import Box
from jaxpar.sharding.params import flat, map_specs

#: Steps of a checkpoint of imported weights.
IMPORTED_STEP = 0


class RunArrays:
    """The parameters of a checkpoint by path, to be read or written box by box."""

    def __init__(self, arrays: dict[str, Any], expected: dict[str, str], where: str):
        """
        Args:     expected: fingerprints by path, as far as they are known. where: for messages.
        """
        self.by_path, self.expected, self.where = arrays, expected, where

    def counted(self, path: str) -> RunningFingerprint:
        """To add up a parameter's fingerprint with, box by box."""
        return RunningFingerprint(self.shape(path))

    def compare(self, path: str, found: str) -> None:
        """Raises:   Damaged when a parameter's fingerprint is not the one that was saved."""
        if path in self.expected:
            name = f"params/{path}"
            damage = integrity.describe_differences({name: self.expected[path]}, {name: found})
            if damage:
                raise integrity.Damaged(self.where, damage)

    def compare_all(self) -> None:
        """Read everything, and compare. Raises as `compare`."""
        for path, array in self.by_path.items():
            if path in self.expected:
                self.compare(path, store.fingerprint_of(array))

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
    """The parameters of a checkpoint, adapters among them; files compared with its list of them.

    Raises:   Damaged when a file is not as listed, or a parameter not there; Unreadable.
    """
    step_folder, where = checkpoint.folder(run_dir) / str(step), f"step {step} of {run_dir}"
    damage = integrity.file_damage(step_folder)
    if damage:
        raise integrity.Damaged(where, damage)
    arrays = {}
    for path in flat(param_specs(cfg.model, cfg.lora)):
        try:
            with integrity.reading_checkpoint(where):
                arrays[path] = store.open_array(step_folder, f"params/{path}")
        except (ValueError, OSError) as error:
            raise integrity.Damaged(where, [f"it lacks params/{path}"]) from error
    known = checkpoint.read_saved(run_dir, step).fingerprints
    if not known:
        integrity.warn(f"{where} has no fingerprints, being of an earlier version: not verified")
    expected = {name.removeprefix("params/"): text for name, text in known.items()}
    return RunArrays(arrays, expected, where)


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
    folder = store.array_folder(checkpoint.folder(run_dir) / str(IMPORTED_STEP))
    shapes = {path: spec.shape for path, spec in flat(specs).items()}
    _tell_shapes(folder, shapes, chunks)
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
        spec = store.array_spec(folder, f"params/{path}")
        spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
        arrays[path] = tensorstore.open(spec, create=True, delete_existing=True).result()
    return RunArrays(arrays, {}, str(run_dir))


def seal_run(run_dir: Path, about: dict[str, Any], found: dict[str, RunningFingerprint]) -> None:
    """Put the fingerprints into a run of `create_run`, now filled, and list its files.

    Args:     about: as given to `create_run`. found: of every parameter, by path.
    """
    step_folder = checkpoint.folder(run_dir) / str(IMPORTED_STEP)
    step = RunningFingerprint(())
    step.add(np.int32(IMPORTED_STEP), ())
    sums = {"step": str(step)} | {f"params/{path}": str(sum_) for path, sum_ in found.items()}
    file = step_folder / METADATA
    metadata = json.loads(file.read_text())
    metadata["custom_metadata"] = integrity.seal(about | {integrity.FINGERPRINTS: sums})
    file.write_text(json.dumps(metadata))
    integrity.write_file_list(step_folder)


def about_import(cfg: Config) -> dict[str, Any]:
    """What a checkpoint of imported weights says about itself: no data, and nothing trained."""
    return {
        "config": dataclasses.asdict(cfg),
        "dataset": checkpoint.NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }


def _tell_shapes(folder: Path, shapes: dict[str, tuple], chunks: dict[str, tuple]) -> None:
    """Put the arrays' shapes where Orbax has noted those of the single numbers."""
    names = {".".join(["params", *path.split("/")]): path for path in shapes}
    for file in (folder / "array_metadatas").iterdir():
        notes = json.loads(file.read_text())
        for note in notes["array_metadatas"]:
            about = note["array_metadata"]
            if about["param_name"] in names:
                about["write_shape"] = about["chunk_shape"] = chunks[names[about["param_name"]]]
        file.write_text(json.dumps(notes))
    tree = json.loads((folder / "_METADATA").read_text())
    for node in tree["tree_metadata"].values():
        name = ".".join(key["key"] for key in node["key_metadata"])
        if name in names:
            node["value_metadata"]["write_shape"] = chunks[names[name]]
    (folder / "_METADATA").write_text(json.dumps(tree))
