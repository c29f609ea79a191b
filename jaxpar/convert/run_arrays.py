"""The parameters of a checkpoint, box by box: read from any run, or written into a new one.

Only one box is in memory at a time (`checkpoint/stored_arrays.py`). The fingerprints of arrays are
computed while their boxes are read or written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import jaxpar
from jaxpar.checkpoint import integrity, stored_arrays, weights_alone
from jaxpar.checkpoint.saved import NO_DATASET, checkpoint_folder, read_saved, require_weights
from jaxpar.config import Config
from jaxpar.config.schema.optimizer import AVERAGED, TRAINED, Weights
from jaxpar.config.values import to_values
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import Box
from jaxpar.sharding.params import flat


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
                self.compare(path, stored_arrays.fingerprint_of(array))

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


def open_run(run_dir: str | Path, cfg: Config, step: int, weights: Weights = TRAINED) -> RunArrays:
    """Open the parameters of a checkpoint, including adapters, and verify its files.

    Args:     weights: those that are trained, or their moving average.
    Raises:   ConfigError when it has no such weights; Damaged when a file differs from its entry in
              the list, or a parameter is missing; Unreadable.
    """
    step_folder, where = checkpoint_folder(run_dir) / str(step), f"step {step} of {run_dir}"
    damage = integrity.file_damage(step_folder)
    if damage:
        raise integrity.Damaged(where, damage)
    saved = read_saved(run_dir, step)
    require_weights(run_dir, saved, weights)
    arrays, names, known = {}, {}, saved.fingerprints
    for path in flat(param_specs(cfg.model, cfg.lora)):
        averaged = weights == AVERAGED and f"{weights}/{path}" in known
        names[path] = f"{weights if averaged else 'params'}/{path}"
        try:
            with integrity.reading_checkpoint(where):
                arrays[path] = stored_arrays.open_array(step_folder, names[path])
        except (ValueError, OSError) as error:
            raise integrity.Damaged(where, [f"it does not contain {names[path]}"]) from error
    expected = {path: known[name] for path, name in names.items() if name in known}
    return RunArrays(arrays, expected, where, names)


def create_run(
    run_dir: Path, cfg: Config, chunks: dict[str, tuple[int, ...]], about: dict[str, Any]
) -> RunArrays:
    """Create a run with one checkpoint that holds only parameters, whose values come later.

    Args:     chunks: shape of the chunks of each parameter, by path.
              about: fields of `checkpoint.Saved`.
    """
    shapes = {path: spec.shape for path, spec in flat(param_specs(cfg.model, cfg.lora)).items()}
    return RunArrays(weights_alone.create(run_dir, shapes, chunks, about), {}, str(run_dir))


def about_import(cfg: Config, sources: Sequence[str]) -> dict[str, Any]:
    """Make the metadata for a checkpoint of imported weights: no data, and no training.

    Args:     sources: folders or names of what was imported.
    """
    return {
        "imported_from": list(sources),
        "config": to_values(cfg),
        "dataset": NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }
