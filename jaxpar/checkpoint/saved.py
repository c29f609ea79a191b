"""Metadata of a run's checkpoints: which exist, and what they contain.

Reads only names and small files, so that a program can decide before it writes anything.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Required, TypedDict

from jaxpar.checkpoint import integrity
from jaxpar.config import (
    Config,
    ConfigError,
    LoraConfig,
    declared,
    flag,
    layers,
)
from jaxpar.config.declared import Count
from jaxpar.config.features import DECLARATIONS
from jaxpar.config.fields import field_types, optional_sections, section_of
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.config.rules.paths import absolute
from jaxpar.config.schema.optimizer import AVERAGED, Weights
from jaxpar.config.serialize import from_values
from jaxpar.config.values import to_values
from jaxpar.data.skips import Range
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn

#: Fields of the adapters, which may not change either.
LORA_FIELDS = tuple(f"lora.{f.name}" for f in dataclasses.fields(LoraConfig))

#: How the state is stored, which is converted when a run resumes with other values.
STORAGE_FIELDS = (
    *("optimizer.first_moment_dtype", "optimizer.second_moment_dtype", "optimizer.moment_block"),
    *(path for one in DECLARATIONS for path in one.storage),
)

#: Stands for the dataset's fingerprint in a checkpoint of imported weights (`jaxpar.convert`).
NO_DATASET = ""

#: Folder of a run for the files that came with its published weights.
CARRIED = "hf"

#: Orbax's file for the metadata of a checkpoint.
METADATA = "_CHECKPOINT_METADATA"

#: The name of a finished checkpoint's folder, as Orbax writes it.
_STEP = re.compile("0|[1-9][0-9]{0,17}")


class BestEntry(TypedDict, total=False):
    """Fields of `best.Best`."""

    what: str
    step: Count
    value: float | None
    stale: Count


class WeightsEntry(TypedDict, total=False):
    """Fields of `training.frozen.chosen.Chosen`."""

    run: Required[str]
    step: Count | None
    weights: str


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The metadata of a checkpoint."""

    step: Count
    """Optimizer steps taken."""
    tokens_seen: Count
    """Tokens trained on so far."""
    config: dict[str, Any]
    """The resolved config, by section and field; an optional section may be None."""
    dataset: str
    """Fingerprint of the dataset; NO_DATASET for imported weights, which have no moments."""
    versions: dict[str, str]
    """Versions of jaxpar and jax."""
    fingerprints: dict[str, str]
    """Fingerprint of each array, by name."""
    skipped_batches: list[Range] = field(default_factory=list)
    """Ranges of batches that the run skips, as (first, count)."""
    rewinds: Count = 0
    """Number of rewinds so far."""
    best: BestEntry = field(default_factory=BestEntry)
    """The best evaluation so far (`best.Best`); empty if the run compares none."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Values of the command that differ from the config, which holds the values in use."""
    weights_from: dict[str, WeightsEntry] = field(default_factory=dict)
    """The weights that the run takes from other runs (`training/chosen.py`), by field."""
    callbacks: dict[str, str] = field(default_factory=dict)
    """The state of each callback (`training/callbacks/`) by its key, as JSON."""
    position: str = ""
    """Where a data source with `next` goes on (`data/own.py`), as JSON; empty for other data."""

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}"

    @property
    def has_average(self) -> bool:
        """Whether it has a moving average of the weights."""
        return any(name.startswith(f"{AVERAGED}/") for name in self.fingerprints)


def checkpoint_folder(run_dir: str | Path) -> Path:
    """Return the absolute folder of a run's checkpoints. (Orbax cannot save to relative paths.)

    Programs that are given a run's path, `normalized` or not, reach its checkpoints through this.
    """
    return absolute(run_dir) / "checkpoints"


def saved_steps(run_dir: str | Path) -> list[int]:
    """Return the steps of a run's finished checkpoints, ascending.

    Reads only names, and starts no device. (Orbax would also read metadata, and fail if that of one
    step is damaged.)

    Raises:   Unreadable.
    """
    return sorted(map(int, integrity.folders_in(checkpoint_folder(run_dir), _STEP)))


def starting_step(cfg: Config) -> int | None:
    """Return the step that a run resumes from, by `checkpoint.resume`; None to start from scratch.

    This is the latest step whose files and metadata are intact. Arrays are verified when they are
    read.

    Raises:   ConfigError when resume is "never" and there is a checkpoint, or "must" and there is
              none; Damaged when all checkpoints are damaged; Unreadable.
    """
    steps, resume, where = (
        saved_steps(cfg.run.dir),
        cfg.checkpoint.resume,
        checkpoint_folder(cfg.run.dir),
    )
    if steps and resume == "never":
        rule = f"but {where} contains the checkpoint of step {steps[-1]}"
        fix = "use a new run.dir, or --checkpoint.resume auto to continue that run"
        raise ConfigError("checkpoint.resume", resume, rule, fix)
    if not steps and resume == "must":
        rule = f"but {where} contains no finished checkpoint"
        fix = "set run.dir to the run to continue, or --checkpoint.resume auto to start one"
        raise ConfigError("checkpoint.resume", resume, rule, fix)
    for step in reversed(steps):
        if not damage(cfg.run.dir, step):
            return step
    if steps:
        raise none_whole(cfg.run.dir, {step: damage(cfg.run.dir, step) for step in steps})
    return None


def damage(run_dir: str | Path, step: int) -> list[str]:
    """Return what is wrong with the files and metadata of a checkpoint. Reads no arrays."""
    found = integrity.file_damage(checkpoint_folder(run_dir) / str(step))
    try:
        read_saved(run_dir, step)
    except integrity.Damaged as error:
        found += error.damage
    return found


def none_whole(run_dir: str | Path, found: Mapping[Any, list[str]]) -> integrity.Damaged:
    """Make the error for a run whose checkpoints are all damaged.

    They stay in place: without them, the same command would start over.
    """
    what = [f"step {step}: {text}" for step, texts in sorted(found.items()) for text in texts]
    return integrity.Damaged(f"every checkpoint of {run_dir}", what)


def read_whole[T](run_dir: str | Path, step: int | None, read: Callable[[int], T]) -> T:
    """Call `read` with a step, or with the latest one that is intact, and return its result.

    For programs that only read a run: they move nothing, and a warning names each damaged step that
    they pass over.

    Args:     step: the only step to read. None: the latest intact one. read: called with a step
              whose files and metadata are intact, if `step` is None. It raises Damaged for damage
              that only the arrays show, and is then called with the step before.
    Raises:   ConfigError when there is no checkpoint; Damaged when all are damaged, or `step` is;
              Unreadable; whatever else `read` raises.
    """
    if step is not None:
        return read(step)
    steps = saved_steps(run_dir)
    if not steps:
        raise _no_checkpoint(run_dir)

    def read_undamaged(at: int) -> T:
        if wrong := damage(run_dir, at):
            raise integrity.Damaged(f"the checkpoint of step {at} of {run_dir}", wrong)
        return read(at)

    return first_whole(run_dir, steps[::-1], read_undamaged, "An earlier step is read instead")


def first_whole[S, T](
    run_dir: str | Path, steps: Sequence[S], read: Callable[[S], T], instead: str
) -> T:
    """Call `read` with one step after another until it raises no Damaged, and return its result.

    A warning on standard error names each step that is passed over.

    Args:     steps: at least one, in the order of preference. instead: ends the warning.
    Raises:   Damaged that names all of them, if `read` raises Damaged for each.
    """
    found: dict[S, list[str]] = {}
    for at in steps:
        try:
            return read(at)
        except integrity.Damaged as error:
            found[at] = error.damage
            if at != steps[-1] and peers.rank() == 0:
                warn(f"{error}. {instead}; nothing was moved.")
    raise none_whole(run_dir, found)


def changed_fields(cfg: Config, saved: Saved) -> dict[str, tuple[Any, Any]]:
    """Return every field that differs from the saved run's: {"parallel.data": (then, now)}.

    A field that the writing version did not have counts as its default.
    """
    then = by_path(to_values(Config())) | by_path(saved.config)
    now = by_path(to_values(cfg))
    return {path: (then[path], now[path]) for path in now if then[path] != now[path]}


def read_saved(run_dir: str | Path, step: int | None = None) -> Saved:
    """Read the metadata of a checkpoint; reads no array.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError when there is no such checkpoint, or jaxpar did not write it; Damaged
              when the metadata is invalid, or does not match its digest; Unreadable.
    """
    steps = saved_steps(run_dir)
    if not steps:
        raise _no_checkpoint(run_dir)
    step = steps[-1] if step is None else step
    if step not in steps:
        held = ", ".join(map(str, steps))
        raise ConfigError("step", step, f"is not a checkpoint of {run_dir}", f"use one of {held}")
    where = f"the checkpoint of step {step} of {run_dir}"
    about = _metadata(checkpoint_folder(run_dir) / str(step), where)
    if integrity.SEAL in about:
        integrity.check_seal(where, about)
    fields = dataclasses.fields(Saved)
    needed = {f.name for f in fields if f.default is f.default_factory} - {"step"}  # both MISSING
    needed.add(integrity.SEAL)
    if missing := sorted(needed - set(about)):
        listed = integrity.has_file_list(checkpoint_folder(run_dir) / str(step))
        if listed or not needed.isdisjoint(about):  # then jaxpar wrote it
            raise integrity.Damaged(where, [f"its metadata has no {', '.join(missing)}"])
        rule = f"the checkpoint of step {step} was not written by jaxpar"
        raise ConfigError("run.dir", str(run_dir), rule, "use a run of jaxpar")
    try:
        return saved_of(about | {"step": step}, "its metadata")
    except UnreadableJson as error:
        raise integrity.Damaged(where, [str(error)]) from error


def saved_of(about: Mapping[str, Any], what: str) -> Saved:
    """Return the metadata of a checkpoint from its JSON. Args: what: its name in errors.

    Raises:   Misshapen.
    """
    found = declared.convert(Saved, about, what)
    is_best = not found.best or found.best.keys() >= BestEntry.__annotations__.keys()
    sections = {name: section for name, section in found.config.items() if section is not None}
    are_fields = all(isinstance(section, dict) for section in sections.values())
    if not sections.keys() >= _SECTIONS or not are_fields or not is_best:
        raise declared.Misshapen(f"{what} has a config or a best evaluation without its fields")
    return found


def _no_checkpoint(run_dir: str | Path) -> ConfigError:
    fix = "use the folder of a run that has saved one"
    return ConfigError("run.dir", str(run_dir), "contains no finished checkpoint", fix)


#: Sections that the config of every version has.
_SECTIONS = {"model", "train", "data", "parallel"}


def _metadata(step_folder: Path, where: str) -> dict[str, Any]:
    """Read the custom metadata of a checkpoint. (Orbax would also read that of each array.)

    Raises:   Damaged when it is missing or invalid; Unreadable.
    """
    try:
        with integrity.reading_checkpoint(where):
            about = read_json_object(step_folder / METADATA, what="it")
    except (OSError, ValueError) as error:
        raise integrity.Damaged(where, [f"{METADATA} cannot be read ({error})"]) from error
    found = about.get("custom_metadata")
    return found if isinstance(found, dict) else {}


def saved_config(run_dir: str | Path, step: int | None = None) -> Config:
    """Load the resolved config of a saved run. Its mesh is that of the run; set your own.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError as `read_saved`, or when this version does not know a field.
    """
    return from_values(read_saved(run_dir, step).config)


def require_weights(run_dir: str | Path, saved: Saved, weights: Weights) -> None:
    """Raises:   ConfigError when a checkpoint does not have such weights."""
    if weights == AVERAGED and not saved.has_average:
        rule = f"{saved} of {run_dir} has no moving average of the weights"
        raise ConfigError("--weights", weights, rule, "use --weights trained")


def check_fields(cfg: Config, saved: Saved, paths: Iterable[str], fix: str) -> None:
    """Raises:   ConfigError for the first of the fields that differs from the saved run's."""
    changed = changed_fields(cfg, saved)
    for path in paths:
        if path in changed:
            then, now = changed[path]
            to = f"to {then!r}"
            if (section := path.rpartition(".")[0]) in optional_sections() and then is None:
                to = f"with {flag(section, None)}"
            raise ConfigError(path, now, f"{saved} has {then!r}", f"{fix} {to}")


def by_path(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten a config in JSON form to {"section.field": value}.

    Fields of an optional section that is None, or that the writing version did not have, are None.
    """
    off = {path: None for path in field_types() if path.rpartition(".")[0] in optional_sections()}
    return off | dict(_leaves(config, ""))


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = prefix + name
        if section_of(field_types().get(path)) is None:
            yield path, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{path}.")


#: Fields of the model that may change when a run resumes.
FREE_MODEL_FIELDS = {"init_std"}

#: Fields of the model beside its layers: a new value would change shapes, or its function.
MODEL_FIELDS = tuple(
    path
    for path in by_path(to_values(Config()))
    if path.startswith("model.")
    and path not in (layers.FIELD, *(f"model.{name}" for name in FREE_MODEL_FIELDS))
)
