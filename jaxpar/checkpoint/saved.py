"""What a run's folder holds, and what a checkpoint says about itself; whether a run may go on.

Reads names and small files only, so that a program can decide before it writes anything.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint import integrity
from jaxpar.config import Config, ConfigError, LoraConfig, ModelConfig
from jaxpar.config.serialize import from_json
from jaxpar.data.sources import fingerprint

#: Fields of the model that may change once the weights are there.
FREE_MODEL_FIELDS = {
    "init_std",
    "dtype",
    "logits_dtype",
    "attention_backend",
    "attention_deterministic",
}

#: The others: a new value would ask for other shapes, or run another function.
MODEL_FIELDS = tuple(
    f"model.{f.name}" for f in dataclasses.fields(ModelConfig) if f.name not in FREE_MODEL_FIELDS
)

#: What the adapters are, if there are any: as the model's fields.
LORA_FIELDS = tuple(f"lora.{f.name}" for f in dataclasses.fields(LoraConfig))

#: How the moments are kept. They are converted when a run goes on with other ones.
MOMENT_DTYPES = ("optimizer.first_moment_dtype", "optimizer.second_moment_dtype")

#: What a run may not change half-way: the moments' meaning, and the order of the data.
RUN_FIELDS = ("optimizer.name", "train.seed", "train.global_batch_size", "data.seq_len")

#: In place of a dataset's fingerprint, in a checkpoint of imported weights (`jaxpar.convert`).
NO_DATASET = ""

#: Where Orbax keeps what is saved beside the arrays.
METADATA = "_CHECKPOINT_METADATA"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says about itself."""

    step: int
    """Optimizer steps taken."""
    tokens_seen: int
    """Tokens trained on so far."""
    config: dict[str, Any]
    """The resolved config, by section and field."""
    dataset: str
    """Fingerprint of the dataset; NO_DATASET for imported weights, which come without moments."""
    versions: dict[str, str]
    """Of jaxpar and jax."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of each array, by name; empty for a checkpoint from before there were any."""
    skipped_batches: list[list[int]] = field(default_factory=list)
    """Windows of batches that the run leaves out, as (first, count)."""
    rewinds: int | None = None
    """How often the run has gone back; None in a checkpoint from before that was counted."""
    asked: dict[str, Any] = field(default_factory=dict)
    """What the command asked for where the config, which is what was used, says otherwise."""

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}"


def folder(run_dir: str | Path) -> Path:
    """Where a run's checkpoints lie. Absolute: Orbax refuses a relative path, at the first save."""
    return Path(run_dir).absolute() / "checkpoints"


def saved_steps(run_dir: str | Path) -> list[int]:
    """Steps of a run's finished checkpoints, ascending. Reads names only, and starts no device.

    Raises:   Unreadable.
    """
    names = ocp.path.step.standard_name_format()
    with integrity.reading_checkpoint(str(folder(run_dir))):
        return sorted(found.step for found in names.find_all(folder(run_dir)))


def starting_step(cfg: Config) -> int | None:
    """The step that a run continues from, by `checkpoint.resume`; None to start afresh.

    It is the latest whose files and metadata are whole; arrays are compared when they are read.

    Raises:   ConfigError when resume is "never" and there is a checkpoint, or "must" and none;
              Damaged when there are some, and none is whole; Unreadable.
    """
    steps, resume, where = saved_steps(cfg.run.dir), cfg.checkpoint.resume, folder(cfg.run.dir)
    if steps and resume == "never":
        rule = f"and {where} holds the checkpoint of step {steps[-1]}"
        fix = "use a new run.dir, or --checkpoint.resume auto to continue that run"
        raise ConfigError("checkpoint.resume", resume, rule, fix)
    if not steps and resume == "must":
        rule = f"and {where} holds no finished checkpoint"
        fix = "set run.dir to the run to continue, or --checkpoint.resume auto to start one"
        raise ConfigError("checkpoint.resume", resume, rule, fix)
    for step in reversed(steps):
        if not damage(cfg.run.dir, step):
            return step
    if steps:
        raise none_whole(cfg.run.dir, {step: damage(cfg.run.dir, step) for step in steps})
    return None


def damage(run_dir: str | Path, step: int) -> list[str]:
    """What is wrong with a checkpoint, its arrays apart: files, and what it says about itself."""
    found = integrity.file_damage(folder(run_dir) / str(step))
    try:
        read_saved(run_dir, step)
    except integrity.Damaged as error:
        found += error.damage
    return found


def none_whole(run_dir: str | Path, found: dict[int, list[str]]) -> integrity.Damaged:
    """The error that no checkpoint of a run can be used. They are left where they are: without
    them, the same command would begin anew."""
    what = [f"step {step}: {text}" for step, texts in sorted(found.items()) for text in texts]
    return integrity.Damaged(f"every checkpoint of {run_dir}", what)


def check_resumable(cfg: Config, saved: Saved) -> None:
    """Refuse another model, optimizer or order of the data; the mesh and all else may change.

    Raises:   ConfigError naming the first field that differs, or that the checkpoint is imported.
    """
    if saved.dataset == NO_DATASET:
        rule = f"holds imported weights in {saved}, and no optimizer's state to resume"
        raise ConfigError("run.dir", cfg.run.dir, rule, "use a new run.dir")
    fixed = MODEL_FIELDS + LORA_FIELDS + RUN_FIELDS
    check_fields(cfg, saved, fixed, "use a new run.dir, or set it back")
    now = fingerprint(cfg)
    if now != saved.dataset:
        rule = f"is not the data of {saved} (fingerprint {now[:8]}, not {saved.dataset[:8]})"
        field = "mixture" if cfg.data.mixture else "path"
        then = saved.config["data"].get("mixture") or saved.config["data"]["path"]
        fix = f"use a new run.dir, or set it back to {then}"
        raise ConfigError(f"data.{field}", getattr(cfg.data, field), rule, fix)


def changed_fields(cfg: Config, saved: Saved) -> dict[str, tuple[Any, Any]]:
    """Every field that differs from the saved run's: {"parallel.data": (then, now)}.

    A field that the writing version did not have counts as its default.
    """
    then = by_path(dataclasses.asdict(Config())) | by_path(saved.config)
    now = by_path(dataclasses.asdict(cfg))
    return {path: (then[path], now[path]) for path in now if then[path] != now[path]}


def read_saved(run_dir: str | Path, step: int | None = None) -> Saved:
    """What a checkpoint says about itself; reads no array.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError when there is no such checkpoint, or jaxpar did not write it; Damaged
              when what it says makes no sense, or is not what was sealed; Unreadable.
    """
    steps = saved_steps(run_dir)
    if not steps:
        fix = "give the folder of a run that has saved one"
        raise ConfigError("run.dir", str(run_dir), "holds no finished checkpoint", fix)
    step = steps[-1] if step is None else step
    if step not in steps:
        held = ", ".join(map(str, steps))
        raise ConfigError("step", step, f"is no checkpoint of {run_dir}", f"use one of {held}")
    where = f"the checkpoint of step {step} of {run_dir}"
    about = _metadata(folder(run_dir) / str(step), where)
    integrity.check_seal(where, about)
    fields = dataclasses.fields(Saved)
    needed = {f.name for f in fields if f.default is f.default_factory} - {"step"}  # both MISSING
    if not needed <= set(about):
        if integrity.has_file_list(folder(run_dir) / str(step)):  # of ours, then
            raise integrity.Damaged(where, ["its metadata is missing"])
        rule = f"the checkpoint of step {step} was not written by jaxpar"
        raise ConfigError("run.dir", str(run_dir), rule, "use a run of jaxpar")
    known = {f.name for f in fields} & set(about)
    return Saved(step=step, **{name: about[name] for name in known})


def _metadata(step_folder: Path, where: str) -> dict[str, Any]:
    """The metadata that was saved with a checkpoint.

    Orbax would read what it knows of each array, too.

    Raises:   Damaged when it is gone, or makes no sense; Unreadable.
    """
    try:
        with integrity.reading_checkpoint(where):
            about = json.loads((step_folder / METADATA).read_bytes())
    except (OSError, ValueError) as error:
        raise integrity.Damaged(where, [f"{METADATA} cannot be read ({error})"]) from error
    found = about.get("custom_metadata") if isinstance(about, dict) else None
    return found if isinstance(found, dict) else {}


def load_config(run_dir: str | Path, step: int | None = None) -> Config:
    """The resolved config of a saved run. Its mesh is the one that wrote it: set your own.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError as `read_saved`, or when this version lacks one of the config's fields.
    """
    return from_json(json.dumps(read_saved(run_dir, step).config))


def check_fields(cfg: Config, saved: Saved, paths: Iterable[str], fix: str) -> None:
    """Raises:   ConfigError naming the first of some fields that differs from the saved run's."""
    changed = changed_fields(cfg, saved)
    for path in paths:
        if path in changed:
            then, now = changed[path]
            raise ConfigError(path, now, f"{saved} has {then!r}", f"{fix} to {then!r}")


def by_path(config: dict[str, Any]) -> dict[str, Any]:
    """{"section.field": value} from a config as JSON."""
    return {f"{name}.{key}": v for name, section in config.items() for key, v in section.items()}
