"""The parameters of a checkpoint, box by box: read from any run, or written into a new one.

Only one box is in memory at a time (`checkpoint/store.py`). The fingerprints of arrays are computed
while their boxes are read or written.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar import checkpoint
from jaxpar.checkpoint import integrity, store
from jaxpar.checkpoint.saved import METADATA, require_weights
from jaxpar.config import Config
from jaxpar.config.json_reader import read_json_object
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import Box
from jaxpar.sharding.params import flat, map_specs

#: The step of a checkpoint of imported weights.
IMPORTED_STEP = 0


class RunArrays:
    """The parameters of a checkpoint by path, for reading or writing box by box."""

    def __init__(
        self,
        arrays: dict[str, Any],
        expected: dict[str, str],
        where: str,
        names: Mapping[str, str] = MappingProxyType({}),
    ):
        """
        Args:     expected: the known fingerprints, by path. where: for messages. names: of the
                  arrays in the checkpoint, by path; those that are missing are "params/PATH".
        """
        self.by_path, self.expected, self.where, self._names = arrays, expected, where, names

    def counted(self, path: str) -> RunningFingerprint:
        """Start a fingerprint of a parameter, to be updated with its values box by box."""
        return _StoredFingerprint(self.shape(path), self.by_path[path].dtype.numpy_dtype)

    def compare(self, path: str, found: str) -> None:
        """Raises:   Damaged when a parameter's fingerprint differs from the saved one."""
        if path in self.expected:
            name = self._names.get(path, f"params/{path}")
            damage = integrity.describe_differences({name: self.expected[path]}, {name: found})
            if damage:
                raise integrity.Damaged(self.where, damage)

    def compare_all(self) -> None:
        """Read and verify all parameters. Raises as `compare`."""
        for path, array in self.by_path.items():
            if path in self.expected:
                self.compare(path, store.fingerprint_of(array))

    def chunk(self, path: str) -> tuple[int, ...]:
        """Return the shape of a parameter's chunks. A read loads complete chunks."""
        return tuple(self.by_path[path].chunk_layout.read_chunk.shape)

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return tuple(self.by_path[path].shape)

    def read(self, path: str, box: Box) -> np.ndarray:
        """Read the float32 values of a box."""
        return self.by_path[path][box].read().result().astype(np.float32, copy=False)

    def write(self, path: str, box: Box, values: np.ndarray) -> None:
        """Write the values of a box. They are on disk when this returns."""
        self.by_path[path][box].write(values).result()


class _StoredFingerprint(RunningFingerprint):
    """The fingerprint of an array that is stored in another dtype than its values are read in."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        super().__init__(shape)
        self._dtype = dtype

    def add(self, values: Any, origin: Sequence[int]) -> None:
        super().add(np.asarray(values).astype(self._dtype, copy=False), origin)


def open_run(
    run_dir: str | Path, cfg: Config, step: int, weights: checkpoint.Weights = checkpoint.TRAINED
) -> RunArrays:
    """Open the parameters of a checkpoint, including adapters, and verify its files.

    Args:     weights: those that are trained, or their moving average.
    Raises:   ConfigError when it has no such weights; Damaged when a file differs from its entry in
              the list, or a parameter is missing; Unreadable.
    """
    step_folder, where = checkpoint.folder(run_dir) / str(step), f"step {step} of {run_dir}"
    damage = integrity.file_damage(step_folder)
    if damage:
        raise integrity.Damaged(where, damage)
    saved = checkpoint.read_saved(run_dir, step)
    require_weights(run_dir, saved, weights)
    arrays, names, known = {}, {}, saved.fingerprints
    for path in flat(param_specs(cfg.model, cfg.lora)):
        averaged = weights == checkpoint.AVERAGED and f"ema/{path}" in known
        names[path] = f"{'ema' if averaged else 'params'}/{path}"
        try:
            with integrity.reading_checkpoint(where):
                arrays[path] = store.open_array(step_folder, names[path])
        except (ValueError, OSError) as error:
            raise integrity.Damaged(where, [f"it does not contain {names[path]}"]) from error
    if not known:
        integrity.warn(f"{where} is not verified: an older version wrote it, without fingerprints")
    expected = {path: known[name] for path, name in names.items() if name in known}
    return RunArrays(arrays, expected, where, names)


def create_run(
    run_dir: Path, cfg: Config, chunks: dict[str, tuple[int, ...]], about: dict[str, Any]
) -> RunArrays:
    """Create a run with one checkpoint that holds only parameters, whose values come later.

    Orbax writes the checkpoint and its metadata with a single number for each array. Then each
    array gets its shape and chunks.

    Args:     chunks: shape of the chunks of each parameter, by path.
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
        # Orbax treats a missing chunk as damage, even if all its values are the fill value.
        spec = store.array_spec(folder, f"params/{path}")
        spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
        arrays[path] = tensorstore.open(spec, create=True, delete_existing=True).result()
    return RunArrays(arrays, {}, str(run_dir))


def seal_run(run_dir: Path, about: dict[str, Any], found: dict[str, RunningFingerprint]) -> None:
    """Add the fingerprints and the file list to a run of `create_run`, after it is filled.

    Args:     about: as given to `create_run`. found: fingerprint of every parameter, by path.
    """
    step_folder = checkpoint.folder(run_dir) / str(IMPORTED_STEP)
    step = RunningFingerprint(())
    step.add(np.int32(IMPORTED_STEP), ())
    sums = {"step": str(step)} | {f"params/{path}": str(sum_) for path, sum_ in found.items()}
    file = step_folder / METADATA
    metadata = read_json_object(file)
    metadata["custom_metadata"] = integrity.seal(about | {integrity.FINGERPRINTS: sums})
    file.write_text(json.dumps(metadata))
    integrity.write_file_list(step_folder)


def about_import(cfg: Config, sources: Sequence[str]) -> dict[str, Any]:
    """Make the metadata for a checkpoint of imported weights: no data, and no training.

    Args:     sources: folders or names of what was imported.
    """
    return {
        "imported_from": list(sources),
        "config": dataclasses.asdict(cfg),
        "dataset": checkpoint.NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }


def _tell_shapes(folder: Path, shapes: dict[str, tuple], chunks: dict[str, tuple]) -> None:
    """Write the arrays' shapes into Orbax's metadata, in place of those of the single numbers."""
    names = {".".join(["params", *path.split("/")]): path for path in shapes}
    for file in (folder / "array_metadatas").iterdir():
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
