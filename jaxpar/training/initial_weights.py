"""The initial weights of a run: drawn at random, from another run, or from a published model.

A run may need them again after it has resumed: they are the reference of an objective, and the
state that a run without a checkpoint returns to.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxpar.checkpoint.saved import CARRIED, MODEL_FIELDS, Saved, read_saved, saved_config
from jaxpar.config import Config, ConfigError, LoraConfig, flag, replace, value_of
from jaxpar.config.addresses import may_change
from jaxpar.config.layers import with_classes_of
from jaxpar.config.values import to_values
from jaxpar.model.parameters import specs_of
from jaxpar.runtime.processes import peers
from jaxpar.sharding.fingerprint import fingerprints
from jaxpar.sharding.params import flat
from jaxpar.step.state import TrainState, init_state, state_of, to_logical, to_running
from jaxpar.training import chosen as weights
from jaxpar.training.chosen import INITIAL, Chosen, folder_of, hash_of

if TYPE_CHECKING:
    from jaxpar.checkpoint.by_place import LayerPlaces
    from jaxpar.convert.hf.importing import PublishedModel

# Only a run with `run.init_from` imports what reads other runs and published weights.


@dataclass(frozen=True)
class Origin:
    """The location of the weights of `run.init_from`, whose shapes fit. No weight is read yet."""

    folder: Path
    step: int | None
    """The step of a run's checkpoint; None for a published model."""
    source: "PublishedModel | None"
    """The published model; None for a run."""
    lora: LoraConfig | None = None
    """The adapters in a run's checkpoint."""
    changes: str = ""
    """The fields of the model that differ, in words; only those of `run.init_changes` may."""
    moved: bool = False
    """Whether the layers have other names (`checkpoint/by_place.py`)."""
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
        from jaxpar.checkpoint.loading import check_model

        folder = folder_of(INITIAL, chosen)
        there = saved_config(folder, chosen.step)
        model = with_classes_of(there.model, cfg.model)  # reading a run imports no code
        there = dataclasses.replace(there, model=model)
        changes, _ = _changes(cfg, there)
        saved = read_saved(folder, chosen.step)
        check_model(replace(cfg, lora=there.lora), saved, folder, "set it back")
        return Origin(folder, chosen.step, None, there.lora, changes, named=named)
    from jaxpar.checkpoint.by_place import LayerPlaces, check_shapes
    from jaxpar.convert.hf.config_file import CONFIG_FILE
    from jaxpar.convert.hf.importing import changes_of, open_source
    from jaxpar.runtime import hub
    from jaxpar.step.adapters import base_config
    from jaxpar.stores.reading import run_at

    place = run_at(INITIAL, named)
    published = place is None or (place / CONFIG_FILE).is_file() or hub.is_name(named)
    if not published:
        rule = "is neither a run with a checkpoint nor a folder with a config.json and .safetensors"
        fix = "use such a folder, or org/model of the Hugging Face Hub"
        raise ConfigError(INITIAL, named, rule, fix)
    source = open_source(named, INITIAL)
    places = LayerPlaces.of(cfg, to_values(source.config))
    if not places.moved:
        return Origin(source.folder, None, source, changes=changes_of(cfg, source))
    changes, _ = _changes(cfg, source.config)
    specs = flat(specs_of(source.config))
    shapes = {f"params/{name}": spec.shape for name, spec in specs.items()}
    check_shapes(base_config(cfg), places, shapes, shapes.__getitem__, source.name)
    return Origin(source.folder, None, source, changes=changes, moved=True)


def state(cfg: Config, mesh: Mesh, origin: Origin | None, log: Callable[[str], None]) -> TrainState:
    """Make the state before the first step. Each device reads or initializes only its own shards.

    Adapters in the checkpoint are merged into its weights; those of `cfg` are initialized as in any
    new run.

    Args:     origin: from `find`. log: called with what was read.
    """
    if origin is None:
        return init_state(cfg, mesh)
    from jaxpar.step import adapters

    if origin.changes:
        log(f"the model of the initial weights is changed: {origin.changes}")
    if origin.source is not None:
        from jaxpar.convert.hf.importing import load_params

        there = adapters.base_config(cfg)
        if origin.moved:
            there = dataclasses.replace(there, model=origin.source.config.model)
        params = load_params(origin.source, there, mesh, log)
        if origin.moved:
            from jaxpar.checkpoint.by_place import params_by_place

            logical = to_logical(TrainState((), params, ()), there).params
            logical = params_by_place(adapters.base_config(cfg), mesh, there, logical)
            params = to_running(TrainState((), logical, ()), cfg).params
    else:
        there = replace(cfg, lora=origin.lora)
        from jaxpar.checkpoint.loading import restore_params

        params = restore_params(origin.folder, there, mesh, origin.step)
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
    from jaxpar.convert.hf.folder import copy_carried
    from jaxpar.convert.hf.importing import keep_source

    if origin.source is not None:
        keep_source(origin.source, run_dir)
    elif (origin.folder / CARRIED).is_dir():
        copy_carried(origin.folder / CARRIED, run_dir / CARRIED)


def _changes(cfg: Config, there: Config) -> "tuple[str, LayerPlaces]":
    """Describe the fields of `run.init_changes` that differ from those of the weights.

    Returns:  (the fields in words, the places of the layers).
    Raises:   ConfigError that names every other field that differs, and the flags that fix it.
    """
    from jaxpar.checkpoint.by_place import LayerPlaces

    places = LayerPlaces.of(cfg, to_values(there))
    differing = [p for p in MODEL_FIELDS if value_of(cfg, p) != value_of(there, p)]
    if not differing:
        places.check_changes(cfg.run.init_from, "set it back", functools.partial(may_change, cfg))
        changed = (f"{path} {then} -> {now}" for path, then, now in places.changes())
        return ", ".join(dict.fromkeys(changed)), places
    short = lambda path: path.removeprefix("model.")  # noqa: E731
    differences = ", ".join(
        f"{short(p)} {value_of(there, p)}, not {value_of(cfg, p)}" for p in differing
    )
    flags = " ".join(dict.fromkeys(_flag(p, there) for p in differing))
    raise ConfigError(
        "run.init_from", cfg.run.init_from, f"contains a model with {differences}", flags
    )


def _flag(path: str, there: Config) -> str:
    """Return the option that gives a field the value that it has there."""
    section, value = path.rpartition(".")[0], value_of(there, path)
    return flag(section, None) if value_of(there, section) is None else flag(path, value)


class InitialWeights:
    """The weights that a run began with."""

    def __init__(self, cfg: Config, chosen: dict[str, Chosen], saved: Saved | None):
        """Find the weights of a new run.

        Args:     chosen: the weights of other runs, which is completed here. saved: the state that
                  the run resumes from; None for a new run.
        Raises:   ConfigError as `find`.
        """
        self._cfg, self._chosen, self._saved = cfg, chosen, saved
        #: Where they are; None if they are random, and in a resumed run before `again`.
        self.origin = find(cfg, chosen.get(INITIAL)) if saved is None else None

    def again(self) -> Origin | None:
        """Return where they are, also in a resumed run; None if they are random.

        All processes call this together.

        Raises:   ConfigError when they are not there any more; PeerFailed.
        """
        if self._saved is None or self.origin is not None:
            return self.origin
        seconds = self._cfg.cluster.slow_seconds or 1e6
        found = weights.of_first_process(
            lambda: weights.initial_again(self._cfg, self._saved), seconds
        )
        self._chosen.update(found)
        open_here = lambda: find(self._cfg, found.get(INITIAL))  # noqa: E731
        self.origin = peers.all_or_none("initial weights", seconds, open_here)
        return self.origin

    @property
    def identity(self) -> str:
        """What identifies them, beside the seed."""
        if (initial := self._chosen.get(INITIAL)) is not None:
            return initial.weights or initial.run
        return ""

    def check_published(self, params: Any) -> None:
        """Record the values of a published model, or compare them with the record.

        Args:     params: made from `again`. Nothing is done for those of a run, whose step says it.
        Raises:   ConfigError if the run began with others.
        """
        initial = self._chosen.get(INITIAL)
        if initial is None or initial.step is not None:
            return
        found = digest_of(params, self._cfg)
        if initial.weights and found != initial.weights:
            rule = "has other weights now than when this run began with them"
            raise ConfigError(INITIAL, initial.run, rule, "bring those files back")
        self._chosen[INITIAL] = dataclasses.replace(initial, weights=found)
