"""The initial weights of a run: drawn at random, from another run, or from a published model."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar import checkpoint
from jaxpar.checkpoint.saved import CARRIED
from jaxpar.config import Config, ConfigError, LoraConfig, flag, replace, value_of
from jaxpar.convert.carried_files import copy_carried
from jaxpar.convert.hf.config_file import CONFIG_FILE
from jaxpar.convert.hf.importing import PublishedModel, keep_source, open_source
from jaxpar.convert.hf.mesh_load import load_params
from jaxpar.runtime import hub
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.step import adapters
from jaxpar.step.state import TrainState, init_state, state_of, to_logical
from jaxpar.stores.models import run_at
from jaxpar.training.frozen.chosen import INITIAL, Chosen, folder_of, hash_of


@dataclass(frozen=True)
class Origin:
    """The location of the weights of `run.init_from`, whose shapes fit. No weight is read yet."""

    folder: Path
    step: int | None
    """The step of a run's checkpoint; None for a published model."""
    source: PublishedModel | None
    """The published model; None for a run."""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    """The adapters in a run's checkpoint."""
    changes: str = ""
    """The fields of the model that differ, in words; only those of `run.init_changes` may."""
    named: str = ""
    """The folder of a run as given, which may be an address."""

    def __str__(self) -> str:
        if self.source is not None:
            return self.source.name
        return f"{self.named or self.folder}, step {self.step}"


def find(cfg: Config, chosen: Chosen | None) -> Origin | None:
    """Find the chosen weights of `run.init_from`; None if there are none.

    Raises:   ConfigError when the folder holds no model, or one that differs from `cfg.model`; as
              `folder_of`.
    """
    if chosen is None:
        return None
    named = chosen.run
    if chosen.step is not None:
        folder = folder_of(INITIAL, chosen)
        there = checkpoint.load_config(folder, chosen.step)
        return Origin(folder, chosen.step, None, there.lora, _changes(cfg, there), named)
    place = run_at(INITIAL, named)
    published = place is None or (place / CONFIG_FILE).is_file() or hub.is_name(named)
    if not published:
        rule = "is neither a run with a checkpoint nor a folder with a config.json and .safetensors"
        fix = "use such a folder, or leave run.init_from empty"
        raise ConfigError(INITIAL, named, rule, fix)
    source = open_source(named, INITIAL)
    return Origin(source.folder, None, source, changes=_changes(cfg, source.config))


def state(cfg: Config, mesh: Mesh, origin: Origin | None, log: Callable[[str], None]) -> TrainState:
    """Make the state before the first step. Each device reads or initializes only its own shards.

    Adapters in the checkpoint are merged into its weights; those of `cfg` are initialized as in any
    new run.

    Args:     origin: from `find`. log: called with what was read.
    """
    if origin is None:
        return init_state(cfg, mesh)
    if origin.changes:
        log(f"the model of the initial weights is changed: {origin.changes}")
    if origin.source is not None:
        params = load_params(origin.source, _as_there(cfg, origin.source.config), mesh, log)
    else:
        there = replace(cfg, lora=origin.lora)
        params = checkpoint.restore_params(origin.folder, there, mesh, origin.step)
        params = adapters.merge(params, there, mesh)
    return state_of(adapters.add_fresh(params, cfg, mesh), cfg, mesh)


def digest_of(params: Any, cfg: Config) -> str:
    """Return a hash of the values of parameters, the same on every mesh."""
    logical = to_logical(TrainState((), params, ()), cfg).params
    return hash_of(sorted(fingerprints({"params": logical}).items()))


def keep_files(origin: Origin, run_dir: Path) -> None:
    """Copy the files that came with published weights from the weights' folder to a run's.

    Exports and generation then have the tokenizer, chat template and ends of text of the model.
    """
    if origin.source is not None:
        keep_source(origin.source, run_dir)
    elif (origin.folder / CARRIED).is_dir():
        copy_carried(origin.folder / CARRIED, run_dir / CARRIED)


def _as_there(cfg: Config, there: Config) -> Config:
    """Return the config with the fields of `run.init_changes` as the weights' model has them."""
    names = cfg.run.init_changes.split(",") if cfg.run.init_changes else ()
    fields = {name: getattr(there.model, name) for name in names}
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **fields))


def _changes(cfg: Config, there: Config) -> str:
    """Describe the fields of `run.init_changes` that differ from those of the weights.

    Raises:   ConfigError that names every other field that differs, and the flags that fix it.
    """
    every = [p for p in checkpoint.MODEL_FIELDS if value_of(cfg, p) != value_of(there, p)]
    allowed = {f"model.{name}" for name in cfg.run.init_changes.split(",")}
    differing = [path for path in every if path not in allowed]
    if not differing:
        return ", ".join(f"{p} {value_of(there, p)} -> {value_of(cfg, p)}" for p in every)
    short = lambda path: path.removeprefix("model.")  # noqa: E731
    differences = ", ".join(
        f"{short(p)} {value_of(there, p)}, not {value_of(cfg, p)}" for p in differing
    )
    flags = " ".join(text for p in differing for text in _flags(p, value_of(there, p)))
    raise ConfigError(
        "run.init_from", cfg.run.init_from, f"contains a model with {differences}", flags
    )


def _flags(path: str, value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        fields = [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
        return [text for name, inner in fields for text in _flags(name, inner)]
    return [flag(path, value)]
