"""Loads a published folder onto a mesh without a checkpoint. Each host reads only its shards."""

from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint import MODEL_FIELDS
from jaxpar.config import Config, ConfigError, value_of
from jaxpar.convert.hf.importing import PublishedModel
from jaxpar.convert.hf.tensor_layout import Entry, read_box, shape_of
from jaxpar.runtime.progress import Meter, meter
from jaxpar.sharding.grid import boxes_of, volume
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, abstract_logical, to_running


def load_params(source: PublishedModel, cfg: Config, mesh: Mesh, log: Callable[[str], None]) -> Any:
    """Load the parameters of a published model, as `checkpoint.restore_params` does for a run.

    The host needs memory for one device's shard of the largest parameter.

    Args:     source: from `importing.open_source`. cfg: a resolved config with the source's model;
              fields that do not affect the weights may differ. log: called with what was read.
    Returns:  the parameters in running order, float32, sharded as `state.state_shardings`.
    Raises:   ConfigError that names the first field of the model that differs.
    """
    check_model(source, cfg)
    to = {path: a.sharding for path, a in flat(abstract_logical(cfg, mesh).params).items()}
    shards = sum(_bytes_here(source, entry, to[entry.path]) for entry in source.entries)
    with meter(shards) as progress:
        arrays = {e.path: _load(source, e, to[e.path], progress) for e in source.entries}
        log(f"read {progress.summary(source.largest)}")
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return to_running(TrainState((), tree, ()), cfg).params


def check_model(source: PublishedModel, cfg: Config) -> None:
    """Raises:   ConfigError that names the first field that differs from the source's model."""
    for path in MODEL_FIELDS:
        now, there = value_of(cfg, path), value_of(source.config, path)
        if now != there:
            rule = f"{source.folder} has {there!r}"
            raise ConfigError(path, now, rule, f"set it to {there!r}")


def _load(source: PublishedModel, entry: Entry, to: NamedSharding, progress: Meter) -> jax.Array:
    """Load a parameter shard by shard: read it once, put it on all its devices, and free it."""
    shape = shape_of(entry.ours, source.sizes)
    placed: list[jax.Array] = []
    for box, devices in boxes_of(shape, to).items():
        values = read_box(entry, source.sizes, box, source.tensors.open)
        placed += [jax.device_put(values, device) for device in devices]
        jax.block_until_ready(placed)
        progress.advance(values.nbytes)
    return jax.make_array_from_single_device_arrays(shape, to, placed)


def _bytes_here(source: PublishedModel, entry: Entry, to: NamedSharding) -> int:
    """Return the size of these shards, in bytes."""
    shape = shape_of(entry.ours, source.sizes)
    return sum(4 * volume(box) for box in boxes_of(shape, to))
