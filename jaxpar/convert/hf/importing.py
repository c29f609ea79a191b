"""`from-hf`: converts the folder of a published model to a run with a checkpoint of step 0."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint import weights_alone
from jaxpar.checkpoint.saved import CARRIED
from jaxpar.config import (
    ComputeConfig,
    Config,
    ConfigError,
    DataConfig,
    Model,
    ParallelConfig,
    RunConfig,
)
from jaxpar.config.addresses import may_change
from jaxpar.config.rules.paths import check_run_folder
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import check
from jaxpar.convert import selfcheck
from jaxpar.convert.hf.composed import differences
from jaxpar.convert.hf.config import (
    COMPUTE_DTYPES,
    check_count,
    dtype_keys,
    dtype_of,
    entry_table,
    family_of,
)
from jaxpar.convert.hf.config import (
    model_of as read_model,
)
from jaxpar.convert.hf.config_file import CONFIG_FILE, Values, read_config_json, refuse
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import (
    CARRIED_FILES,
    INDEX_FILE,
    Tensors,
    check_tensors,
    copy_carried,
    find_tensors,
)
from jaxpar.convert.hf.keys.known import unknown
from jaxpar.convert.hf.other_names import as_published
from jaxpar.convert.hf.tensor_layout import (
    Entry,
    chunk_shape,
    read_box,
    tensors_in,
)
from jaxpar.convert.run_arrays import (
    RunArrays,
    about_import,
    create_run,
    open_run,
)
from jaxpar.data.formats.meta import TOKENIZER_FILE
from jaxpar.data.tokenizer import UnusableTokenizer, read_checked
from jaxpar.model.flops import num_adapter_params, num_params
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.outputs import refuse_used, require_space
from jaxpar.runtime.progress import Meter, meter
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import boxes_of, grid, volume
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, abstract_logical, to_running
from jaxpar.stores import reading

#: Number of values in memory at the same time: 64 MiB of float32.
PIECE = 1 << 24

#: Files of a published model that an import reads.
WEIGHTS_AND_TOKENIZER = ("*.safetensors", INDEX_FILE, *CARRIED_FILES)

#: Maximum default sequence length of an imported run; the command line may set a larger one.
MAX_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model, found and checked. Only headers have been read."""

    folder: Path
    name: str
    """Its folder, or its name on the Hub with the commit."""
    values: Values
    """Values of its config.json, with the dtype of the tensors."""
    family: Family
    config: Config
    """The model, with defaults for all other fields."""
    entries: list[Entry]
    tensors: Tensors
    left_out: tuple[str, ...] = ()
    """Names of tensors of layers for multi-token prediction: all of them in some families, and
    copies of the embedding and the head in others."""
    absent: Values = field(default_factory=dict)
    """Keys of config.json that name layers which the files do not have."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.num_bytes for stored in self.tensors.stored.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(stored.num_bytes for stored in self.tensors.stored.values())


def open_source(named: str | Path, option: str = "DIR") -> PublishedModel:
    """Open a published model, and check that all tensors exist, with their shapes.

    Args:     named: its folder or address, or its name on the Hugging Face Hub (`models.find`).
              option: for errors.
    Raises:   ConfigError that names the key of config.json, the tensor or the file that is wrong.
    """
    rule, fix = "is not a folder", "use a published folder with config.json and .safetensors files"
    found = reading.find_model(str(named), option, WEIGHTS_AND_TOKENIZER, rule, fix)
    folder = found.folder
    values = read_config_json(folder)
    family = family_of(values)
    dtype_of(values)
    tensors = find_tensors(folder, family.prefix)
    # The dtype in config.json often differs from that of the files, or is missing.
    values |= dict.fromkeys(dtype_keys(values), tensors.dtype())
    tensors = Tensors(as_published(tensors.stored, family, values))
    check_count(values, family, len(tensors.stored))
    absent = _absent_modules(values, family, tensors)
    values |= dict.fromkeys(absent, 0)
    model = read_model(values, family)
    cfg = config_for(model, values)
    entries = entry_table(family, model)
    left_out = _mtp_tensors(family, tensors) + _copies(model, family, tensors)
    tensors = Tensors({name: t for name, t in tensors.stored.items() if name not in left_out})
    check_tensors(tensors, entries)
    return PublishedModel(
        folder=folder,
        name=found.name,
        values=values,
        family=family,
        config=cfg,
        entries=entries,
        tensors=tensors,
        left_out=left_out,
        absent=absent,
    )


def _mtp_tensors(family: Family, tensors: Tensors) -> tuple[str, ...]:
    """Return the names of tensors for multi-token prediction that jaxpar has no modules for."""
    prefix = family.mtp_prefix
    return tuple(name for name in tensors.stored if prefix and name.startswith(prefix))


def _absent_modules(values: Values, family: Family, tensors: Tensors) -> Values:
    """Return the key of multi-token prediction, with its value, if the files have no such layers.

    Conversions of a model often lack them, and keep the key.
    """
    key, layers = family.fields.get("mtp_depth", ""), values.get("num_hidden_layers")
    names = [key, *(other for other, own in family.taken.items() if own == key)]
    prefix = f"model.layers.{layers}."
    there = any(name.startswith(prefix) for name in tensors.stored)
    return {} if there else {name: values[name] for name in names if values.get(name)}


def _copies(model: Model, family: Family, tensors: Tensors) -> tuple[str, ...]:
    """Return the names of tensors of modules that are copies of others.

    Raises:   ConfigError for one that is not: jaxpar has one embedding and one head.
    """
    found = []
    first = model.num_layers
    for k in range(first, first + model.mtp_depth):
        for name, other in family.copies.items():
            name = name.format(P=k)
            if name not in tensors.stored or other not in tensors.stored:
                continue
            copy, of = tensors.open(name), tensors.open(other)
            if copy.shape != of.shape or not all(map(np.array_equal, copy, of)):
                rule = f"must be a copy of {other}, which jaxpar's modules share"
                raise refuse(name, list(copy.shape), rule, "use a model whose modules share it")
            found.append(name)
    return tuple(found)


def config_for(model: Model, values: Values) -> Config:
    """Return the config of a run for a model, in the compute dtype of its weights.

    All other fields have their defaults.

    Raises:   ConfigError if the model is invalid.
    """
    longest = model.max_positions or values.get("max_position_embeddings") or MAX_SEQ_LEN
    hybrid = any(x.mixer is None or x.mixer.recurrent for x in model.layers)
    loop: Literal["scan", "unroll"] = "scan" if hybrid or len(model.stacks) == 1 else "unroll"
    cfg = Config(
        model=model,
        compute=ComputeConfig(dtype=COMPUTE_DTYPES[dtype_of(values)]),
        data=DataConfig(seq_len=min(longest, MAX_SEQ_LEN)),
        parallel=ParallelConfig(layer_loop=loop),
    )
    check(cfg)
    return cfg


def from_hf(
    folder: str | Path,
    run_dir: str | Path,
    log: Callable[[str], None],
    tolerance: float | None = selfcheck.TOLERANCE,
) -> PublishedModel:
    """Convert a published model to a run.

    Needs memory for a few times PIECE values. The run appears when it is complete.

    Args:     log: called with each result. tolerance: of the self-check; None to skip it.
    Raises:   ConfigError as `open_source`, and when the run's folder is in use; CheckFailed.
    """
    source, run_dir = open_source(folder), Path(run_dir)
    if others := unknown(source.values, source.family):
        names = ", ".join(sorted(others))
        log(f"WARNING    config.json has keys that jaxpar does not know, and ignores: {names}")
    for key, count in source.absent.items():
        log(f"config.json has {key} {count}, but the files have no such layers: none are imported")
    if source.left_out:
        log(f"left out {len(source.left_out)} tensors of layers for multi-token prediction")
    check_tokenizer(source.folder, log, strict=tolerance is not None)
    cfg = source_config(source, run_dir)
    with new_run(cfg, [source], log) as temporary:
        if tolerance is not None:
            published = selfcheck.published_reader(source.entries, source.tensors)
            run = selfcheck.run_reader(
                open_run(temporary, cfg, weights_alone.STEP), cfg.model, "float32"
            )
            selfcheck.check_conversion(cfg.model, run, published, source.folder, tolerance, log)
    return source


@contextlib.contextmanager
def new_run(
    cfg: Config, parts: Sequence[PublishedModel], log: Callable[[str], None]
) -> Iterator[Path]:
    """Write a run to a temporary folder, yield it, and rename it if the block succeeds.

    A run has a checkpoint, a config and the files of its tokenizer.

    Args:     parts: the published model, and its adapters, if any. log: called with the size and
              speed of reading.
    Raises:   ConfigError when the run's folder is in use, or the disk is too small.
    """
    run_dir = Path(cfg.run.dir)
    refuse_used("RUN", run_dir)
    check_run_folder("RUN", str(run_dir), "use another name")
    size = num_params(cfg.model) + num_adapter_params(cfg.model, cfg.lora)
    require_space("RUN", run_dir, 4 * size)
    with new_folder(run_dir) as folder:
        source, about = parts[0], about_import(cfg, [part.name for part in parts])
        placed = [(part, entry) for part in parts for entry in part.entries]
        chunks = {entry.path: chunk_shape(entry, PIECE) for _, entry in placed}
        arrays = create_run(folder, cfg, chunks, about)
        with meter(sum(part.num_bytes for part in parts)) as progress:
            found = {entry.path: copy_in(part, entry, arrays, progress) for part, entry in placed}
            log(f"read {progress.summary(source.largest)}")
        weights_alone.seal(folder, about, found)
        (folder / "config.json").write_text(to_json(cfg))
        keep_source(source, folder)
        yield folder


def keep_source(source: PublishedModel, run_dir: Path) -> None:
    """Copy the files that came with published weights to a run's folder."""
    copy_carried(source.folder, run_dir / CARRIED)
    (run_dir / CARRIED / CONFIG_FILE).write_text(json.dumps(source.values, indent=2) + "\n")


def check_tokenizer(folder: Path, log: Callable[[str], None], *, strict: bool) -> None:
    """Check the tokenizer.json that the run will have, if the folder has one.

    Args:     log: called with the error. strict: raise it, too, as part of the self-check.
    Raises:   CheckFailed if it is strict and the tokenizer cannot be used.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    try:
        read_checked(file)
    except (OSError, UnusableTokenizer) as error:
        log(f"WARNING    {file} cannot be used: {error}")
        if strict:
            fix = "download it again, or use --no-check to convert the weights without a tokenizer"
            raise selfcheck.CheckFailed(f"{file} cannot be used: {error}; {fix}") from error


def source_config(source: PublishedModel, run_dir: Path) -> Config:
    """Return the config of the run for a published model."""
    return dataclasses.replace(source.config, run=RunConfig(dir=str(run_dir)))


def copy_in(
    source: PublishedModel, entry: Entry, arrays: RunArrays, progress: Meter
) -> RunningFingerprint:
    """Copy a parameter, chunk by chunk. Returns its fingerprint."""
    found = arrays.counted(entry.path)
    for box in grid(entry.shape, arrays.chunk(entry.path)):
        values = read_box(entry, box, source.tensors.open)
        arrays.write(entry.path, box, values)
        found.add(values, [part.start for part in box])
        parts = tensors_in(entry, box, source.tensors.open)
        progress.advance(sum(part.nbytes for _, _, part in parts))
    return found


# ------- Loads a published folder onto a mesh without a checkpoint. Each host reads only its shards


def load_params(source: PublishedModel, cfg: Config, mesh: Mesh, log: Callable[[str], None]) -> Any:
    """Load the parameters of a published model, as `restore_params` does for a run.

    The host needs memory for one device's shard of the largest parameter.

    Args:     source: from `importing.open_source`. cfg: a resolved config with the source's model;
              fields that do not affect the weights may differ. log: called with what was read.
    Returns:  the parameters in running order, float32, sharded as `state.state_shardings`.
    Raises:   ConfigError that names the first tensor of another shape.
    """
    entries = entry_table(source.family, cfg.model)  # by the names of its layers
    check_tensors(source.tensors, entries, "the config")
    to = {path: a.sharding for path, a in flat(abstract_logical(cfg, mesh).params).items()}
    shards = sum(_bytes_here(entry, to[entry.path]) for entry in entries)
    with meter(shards) as progress:
        arrays = {e.path: _load(source, e, to[e.path], progress) for e in entries}
        log(f"read {progress.summary(source.largest)}")
    tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
    return to_running(TrainState((), tree, ()), cfg).params


def changes_of(cfg: Config, source: PublishedModel) -> str:
    """Describe the fields of `run.init_changes` that differ from those of a published model.

    Raises:   ConfigError that names every other field that differs.
    """
    every = list(differences(cfg.model, source.config.model))
    if wrong := [d for d in every if not may_change(cfg, d.path)]:
        short = (f"{d.path.removeprefix('model.')} {d.other}, not {d.value}" for d in wrong)
        named, rule = cfg.run.init_from, f"contains a model with {', '.join(short)}"
        raise ConfigError("run.init_from", named, rule, f"--model.from {named}")
    return ", ".join(f"{d.path} {d.other} -> {d.value}" for d in every)


def _load(source: PublishedModel, entry: Entry, to: NamedSharding, progress: Meter) -> jax.Array:
    """Load a parameter shard by shard: read it once, put it on all its devices, and free it."""
    placed: list[jax.Array] = []
    for box, devices in boxes_of(entry.shape, to).items():
        values = read_box(entry, box, source.tensors.open)
        placed += [jax.device_put(values, device) for device in devices]
        jax.block_until_ready(placed)
        progress.advance(values.nbytes)
    return jax.make_array_from_single_device_arrays(entry.shape, to, placed)


def _bytes_here(entry: Entry, to: NamedSharding) -> int:
    """Return the size of these shards, in bytes."""
    return sum(4 * volume(box) for box in boxes_of(entry.shape, to))
