"""`to-hf`: exports a run's checkpoint as a folder of a published family."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.saved import CARRIED, read_saved, saved_config
from jaxpar.config import Config, ConfigError, Model
from jaxpar.config.layers import SavedComponent
from jaxpar.config.schema.optimizer import TRAINED, Weights
from jaxpar.convert import selfcheck
from jaxpar.convert.hf import tokenizer
from jaxpar.convert.hf.chat_format import is_imported
from jaxpar.convert.hf.config import (
    choose_family,
    config_json,
    dtype_of,
    entry_table,
    family_of,
    named_family,
    why_not,
)
from jaxpar.convert.hf.config_file import CONFIG_FILE, Values, read_config_json
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import check_tensors, copy_carried, create_tensors, find_tensors
from jaxpar.convert.hf.tensor_layout import (
    Entry,
    assign,
    tensor_names,
    tensor_shape,
    tensors_in,
)
from jaxpar.convert.peft.merging import MergedArrays, check_merge
from jaxpar.convert.run_arrays import RunArrays, open_run
from jaxpar.convert.safetensors_file import DTYPES, NAMES, Stored
from jaxpar.model.flops import num_params
from jaxpar.model.mup import standard
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.outputs import refuse_used, require_space
from jaxpar.runtime.progress import Meter, meter
from jaxpar.sharding.grid import Box, extent, grid, volume

#: Keys of config.json with the same meaning in every family, which no field of jaxpar sets.
OF_ANY_FAMILY = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")

#: Maximum size of a weights file, unless a single tensor is larger.
SHARD_BYTES = 5_000_000_000

#: Yields, for a box of a parameter: an index in the box, the name of a tensor, and the view of the
#: tensor where the values at the index go.
type Parts = Callable[[Box], Iterator[tuple[tuple[int, ...], str, np.ndarray]]]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint to export."""

    run: Path
    step: int
    config: Config
    dtype: str
    """Dtype of the weights on disk."""
    arrays: RunArrays
    """The model's parameters, with adapters merged into them."""


@dataclass(frozen=True, kw_only=True)
class Export(Opened):
    """A checkpoint, and the published format to export it in."""

    family: Family
    carried: Values
    """Values of the imported config.json; only OF_ANY_FAMILY for another family."""
    entries: list[Entry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return DTYPES[NAMES[self.dtype]].itemsize * num_params(self.config.model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of each tensor, layer by layer as in published files."""
        found: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            found |= dict.fromkeys(tensor_names(entry), tensor_shape(entry))
        return dict(sorted(found.items(), key=lambda item: in_order(item[0])))


def open_export(
    run: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    family: str | None = None,
    weights: Weights = TRAINED,
) -> Export:
    """Open a checkpoint for export, and choose dtype and family.

    Args:     step: None for the latest. dtype: None for that of the imported weights, or the
              model's compute dtype. family: its `model_type`; None for that of the imported model,
              or the first that can express the model. weights: as in `open_run`.
    Raises:   ConfigError when there is no such checkpoint, or the family cannot express its model.
    """
    saved = read_saved(run, step)
    cfg = saved_config(run, saved.step)
    for layer in cfg.model.layers:
        for term in (layer.mixer, layer.feed_forward):
            if isinstance(term, SavedComponent):  # of a user's own class
                rule, fix = "fits no published family", f"use `to-torch {run} model.safetensors`"
                raise ConfigError(f"model.{layer.name}", term.name, rule, fix)
    carried = carried_config(run)
    chosen = choose(family, standard(cfg.model), carried)
    opened = open_checkpoint(run, saved.step, cfg, dtype, weights)
    return Export(
        **vars(opened),
        family=chosen,
        carried=carried_values(carried, chosen),
        entries=entry_table(chosen, opened.config.model),
    )


def open_checkpoint(
    run: str | Path, step: int, cfg: Config, dtype: str | None, weights: Weights
) -> Opened:
    """Open a checkpoint. Args:     cfg: that of the run. Others, and errors, as `open_export`."""
    cfg = dataclasses.replace(cfg, model=standard(cfg.model))
    if dtype is None:
        carried = carried_config(run)
        dtype = dtype_of(carried) if carried else cfg.compute.dtype
    arrays = open_run(run, cfg, step, weights)
    cfg = without_padding(run, cfg)
    if cfg.lora:
        arrays = MergedArrays(arrays, cfg.lora)
    return Opened(run=Path(run), step=step, config=cfg, dtype=dtype, arrays=arrays)


def carried_config(run: str | Path) -> Values:
    """Return the config.json that came with the run's weights; {} without."""
    kept = Path(run) / CARRIED
    return read_config_json(kept) if (kept / CONFIG_FILE).is_file() else {}


def without_padding(run: str | Path, cfg: Config) -> Config:
    """Return the config with the vocabulary of the run's tokenizer, without padded ids.

    Elsewhere, nothing would keep padded ids from being sampled. A model with published weights
    keeps its vocabulary, and so does one whose tokenizer is missing.
    """
    if (Path(run) / CARRIED).is_dir():
        return cfg
    try:
        size = tokenizer.tokenizer_of_run(run, cfg).vocab_size
    except ConfigError:
        return cfg
    size = min(size, cfg.model.vocab_size)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=size))


def choose(family: str | None, m: Model, carried: Values) -> Family:
    """Return the family to export a model as; arguments and errors as `open_export`."""
    if family is None:
        chosen = family_of(carried) if carried else choose_family(m)
    else:
        chosen = named_family(family)
    reason = why_not(chosen, m)
    if reason is not None:
        fix = f"use --family {choose_family(m).model_type}"
        rule = f"cannot express this model ({reason})"
        raise ConfigError("--family", chosen.model_type, rule, fix)
    return chosen


def carried_values(imported: Values, family: Family) -> Values:
    """Return the values of an imported config.json to keep in an export to a family."""
    if imported.get("model_type") == family.model_type:
        return imported
    return {key: value for key, value in imported.items() if key in OF_ANY_FAMILY}


def to_hf(
    export: Export,
    folder: Path,
    log: Callable[[str], None],
    tolerance: float | None = selfcheck.TOLERANCE,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder. It appears when it is complete and checked.

    Args:     log: called with each result. tolerance: of the self-check; None to skip it.
    Raises:   ConfigError when the folder is in use; CheckFailed.
    """
    refuse_used("DIR", folder)
    require_space("DIR", folder, export.num_bytes)
    m = export.config.model
    with new_folder(folder) as temporary:
        write_export(export, temporary, log, shard_bytes)
        if tolerance is not None and isinstance(export.arrays, MergedArrays):
            check_merge(export.arrays, export.config, tolerance, log)
        if tolerance is not None:
            tensors = find_tensors(temporary)
            check_tensors(tensors, export.entries)
            published = selfcheck.published_reader(export.entries, tensors)
            run = selfcheck.run_reader(export.arrays, m, export.dtype)
            selfcheck.check_conversion(
                m, run, published, temporary, tolerance, log, "the written files"
            )


def write_export(
    export: Export, folder: Path, log: Callable[[str], None], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config, tokenizer and weights into an empty folder.

    Needs memory for a few of the largest chunks in the checkpoint.
    """
    m, family = export.config.model, export.family
    copy_carried(export.run / CARRIED, folder)
    carried = export.carried
    if "model_type" not in carried:
        carried = own_values(export.config) | carried
    if not is_imported(export.run, export.config):
        carried |= tokenizer.write(export.run, export.config, folder, log)
    values = config_json(m, family, carried, export.dtype)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
    shapes = export.shapes()
    stored = create_tensors(folder, shapes, export.dtype, shard_bytes)
    with meter(sum(s.num_bytes for s in stored.values())) as progress:
        for entry in export.entries:
            copy_out(export, entry, stored, progress)
        log(f"wrote {progress.summary(max(s.num_bytes for s in stored.values()))}")


def own_values(cfg: Config) -> Values:
    """Return the values of config.json other than the model's fields, unless they were imported."""
    return {
        "max_position_embeddings": cfg.data.seq_len,
        "initializer_range": cfg.model.init_std,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def copy_out(export: Export, entry: Entry, stored: dict[str, Stored], progress: Meter) -> None:
    """Copy a parameter into the tensors of its entry; errors as `copy_parameter`."""
    writable = lambda name: stored[name].open("r+")  # noqa: E731
    parts = lambda box: tensors_in(entry, box, writable)  # noqa: E731
    copy_parameter(export, entry.path, entry.shape, parts, progress)


def copy_parameter(
    export: Opened, path: str, shape: tuple[int, ...], parts: Parts, progress: Meter
) -> None:
    """Copy a parameter, chunk by chunk.

    Args:     shape: that of the run, or smaller (`without_padding`). parts: where a box of it goes.
    Raises:   ConfigError that names the tensor when a value is too large for the dtype; Damaged
              when the parameter differs from what was saved.
    """
    arrays = export.arrays
    found = arrays.counted(path)
    for box in grid(arrays.shape(path), arrays.chunk(path)):
        values = arrays.read(path, box)
        found.add(values, [part.start for part in box])
        box = tuple(slice(p.start, min(p.stop, n)) for p, n in zip(box, shape, strict=True))
        if not volume(box):
            continue
        values = values[tuple(map(slice, extent(box)))]
        for place, name, part in parts(box):
            with np.errstate(over="ignore"):
                assign(part, values[place])
            if export.dtype == "float16" and np.isinf(part).any():
                rule = "has values beyond 65,504, the largest float16"
                raise ConfigError(name, "float16", rule, "use --dtype bfloat16")
            progress.advance(part.nbytes)
    arrays.compare(path, str(found))


def in_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sorting key that puts layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
