"""Checkpoints: the training state on disk, written in the background, readable under any mesh.

RUN/checkpoints/STEP holds {"step", "params", "opt_state"}: whole arrays, layers in the model's
order. How the writing mesh cut and ordered them leaves no trace, so another mesh restores them as
its own would. The config lies with them: whoever has the folder needs nothing else.

    Checkpointer                    the training loop's: saves
    starting_step, restore          a run's: continues, or says why it cannot
    load_config, restore_params     everybody else's: reads a model
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar.config import Config, ConfigError, LoraConfig, ModelConfig, replace
from jaxpar.config_json import from_json
from jaxpar.data.sources import fingerprint
from jaxpar.params import flat
from jaxpar.state import (
    TrainState,
    abstract_state,
    in_configured_dtypes,
    snapshot,
    state_shardings,
    to_running,
)

#: Fields of the model that may change once the weights are there.
FREE_MODEL_FIELDS = {"init_std", "dtype", "attention_backend", "attention_deterministic"}

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

#: Bytes read from disk at a time, and kept on the host until they are on a device; or the largest
#: array's, if that is more.
READ_AHEAD = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says about itself."""

    step: int
    """Optimiser steps taken."""
    tokens_seen: int
    """Tokens trained on so far."""
    config: dict[str, Any]
    """The resolved config, by section and field."""
    dataset: str
    """Fingerprint of the dataset; NO_DATASET for imported weights, which come without moments."""
    versions: dict[str, str]
    """Of jaxpar and jax."""

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}"


def folder(run_dir: str | Path) -> Path:
    """Where a run's checkpoints lie. Absolute: Orbax refuses a relative path, at the first save."""
    return Path(run_dir).absolute() / "checkpoints"


def saved_steps(run_dir: str | Path) -> list[int]:
    """Steps of a run's finished checkpoints, ascending. Reads names only, and starts no device."""
    names = ocp.path.step.standard_name_format()
    return sorted(found.step for found in names.find_all(folder(run_dir)))


class Checkpointer:
    """Saves the state in the background, and deletes what `checkpoint.keep*` does not keep.

    Use as a context manager: leaving it waits for the last save. When to save is the caller's to
    decide. Every process makes one and makes the same calls on it. It owns the run's folder, and
    sweeps away what killed saves left there.
    """

    def __init__(self, cfg: Config):
        """Open the run's folder, making it if need be.

        Raises:   ConfigError when the data cannot be opened.
        """
        self._cfg = cfg
        self._about = {
            "config": dataclasses.asdict(cfg),
            "dataset": fingerprint(cfg),
            "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        }
        context = ocp.Context()
        # Weights hardly compress: zstd made them 8% smaller and saves six to ten times slower.
        context.array.saving.use_compression = False
        # In the background, a folder that cannot be made shows as a save that hangs for 5 minutes.
        context.async_options.create_directories_asynchronously = False
        self._orbax = ocp.training.Checkpointer(
            folder(cfg.run.dir),
            context=context,
            preservation_policy=_preservation(cfg),
            cleanup_tmp_directories=True,
        )
        self._saving: ocp.AsyncResponse[bool] | None = None

    def save(self, state: TrainState, step: int, tokens_seen: int) -> bool:
        """Start saving; training may go on, and donate the state, as soon as this returns.

        Args:     state: the running state, sharded as `state.state_shardings`. step: optimiser
                  steps taken. tokens_seen: tokens trained on, counted on the host.
        Returns:  False, and nothing is done, when this step is saved already.
        Raises:   whatever made the previous save fail.
        """
        self.wait()
        if step in self.steps():
            return False
        tree = vars(snapshot(state, self._cfg))
        about = self._about | {"tokens_seen": int(tokens_seen)}
        # Without `force`, Orbax has its own opinion on when to save.
        self._saving = self._orbax.save_async(step, tree, force=True, custom_metadata=about)
        return True

    def wait(self) -> None:
        """Wait for the save under way, if any.

        Raises:   whatever made it fail, once.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except Exception:
            # Orbax reports a failure once to each thread that asks, and `result` asks from its
            # own: the next save would hear of it again. It has also forgotten, not deleted, the
            # checkpoints that this one was to replace.
            with contextlib.suppress(Exception):
                self._orbax.wait()
            self._orbax.reload()
            raise

    def steps(self) -> list[int]:
        """Steps saved or being saved, and kept; ascending. The same in every process."""
        return [saved.step for saved in self._orbax.checkpoints]

    def close(self) -> None:
        """Wait for the save under way, raising as `wait`, and let go of the folder."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _preservation(cfg: Config) -> Any:
    """Which checkpoints stay. (Orbax's default is all of them.)"""
    policies, keep_every = ocp.training.preservation_policies, cfg.checkpoint.keep_every
    multiples = [policies.EveryNSteps(keep_every)] if keep_every else []
    return policies.AnyPreservationPolicy([policies.LatestN(cfg.checkpoint.keep), *multiples])


def starting_step(cfg: Config) -> int | None:
    """The step that a run continues from, by `checkpoint.resume`; None to start afresh.

    Reads names only, so that a program can decide before it writes anything.

    Raises:   ConfigError when resume is "never" and there is a checkpoint, or "must" and none.
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
    return steps[-1] if steps else None


def check_resumable(cfg: Config, saved: Saved) -> None:
    """Refuse another model, optimiser or order of the data; the mesh and all else may change.

    Raises:   ConfigError naming the first field that differs, or that the checkpoint is imported.
    """
    if saved.dataset == NO_DATASET:
        rule = f"holds imported weights in {saved}, and no optimiser's state to resume"
        raise ConfigError("run.dir", cfg.run.dir, rule, "use a new run.dir")
    fixed = MODEL_FIELDS + LORA_FIELDS + RUN_FIELDS
    _check_fields(cfg, saved, fixed, "use a new run.dir, or set it back")
    now = fingerprint(cfg)
    if now != saved.dataset:
        rule = f"is not the data of {saved} (fingerprint {now[:8]}, not {saved.dataset[:8]})"
        field = "mixture" if cfg.data.mixture else "path"
        then = saved.config["data"].get("mixture") or saved.config["data"]["path"]
        fix = f"use a new run.dir, or set it back to {then}"
        raise ConfigError(f"data.{field}", getattr(cfg.data, field), rule, fix)


def restore(cfg: Config, mesh: Mesh, step: int | None = None) -> TrainState:
    """The run's state, for this config and mesh, whatever mesh it was saved from.

    Args:     step: a saved step. None: the latest.
    Returns:  the running state, sharded as `state.state_shardings(cfg, mesh)`; moments that were
              kept in another dtype are converted, to bfloat16 by rounding to the nearest.
    Raises:   ConfigError as `check_resumable`, before an array is read, and for a missing step.
    """
    saved = read_saved(cfg.run.dir, step)
    check_resumable(cfg, saved)
    loaded = _load(cfg.run.dir, saved.step, vars(_target(_with_saved_dtypes(cfg, saved), mesh)))
    if int(loaded["step"]) != saved.step:
        raise ValueError(f"{saved} holds the state of step {int(loaded['step'])}")
    return to_running(in_configured_dtypes(TrainState(**loaded), cfg), cfg)


def changed_fields(cfg: Config, saved: Saved) -> dict[str, tuple[Any, Any]]:
    """Every field that differs from the saved run's: {"parallel.data": (then, now)}.

    A field that the writing version did not have counts as its default.
    """
    then = _by_path(dataclasses.asdict(Config())) | _by_path(saved.config)
    now = _by_path(dataclasses.asdict(cfg))
    return {path: (then[path], now[path]) for path in now if then[path] != now[path]}


def read_saved(run_dir: str | Path, step: int | None = None) -> Saved:
    """What a checkpoint says about itself; reads no array.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError when there is no such checkpoint, or jaxpar did not write it.
    """
    steps = saved_steps(run_dir)
    if not steps:
        fix = "give the folder of a run that has saved one"
        raise ConfigError("run.dir", str(run_dir), "holds no finished checkpoint", fix)
    step = steps[-1] if step is None else step
    if step not in steps:
        held = ", ".join(map(str, steps))
        raise ConfigError("step", step, f"is no checkpoint of {run_dir}", f"use one of {held}")
    about = ocp.checkpointables_metadata(folder(run_dir) / str(step)).custom_metadata
    names = {field.name for field in dataclasses.fields(Saved)} - {"step"}
    if not names <= set(about or ()):
        rule = f"the checkpoint of step {step} was not written by jaxpar"
        raise ConfigError("run.dir", str(run_dir), rule, "use a run of jaxpar")
    return Saved(step=step, **{name: about[name] for name in names})


def load_config(run_dir: str | Path, step: int | None = None) -> Config:
    """The resolved config of a saved run. Its mesh is the one that wrote it: set your own.

    Args:     step: a saved step. None: the latest.
    Raises:   ConfigError as `read_saved`, or when this version lacks one of the config's fields.
    """
    return from_json(json.dumps(read_saved(run_dir, step).config))


def restore_params(run_dir: str | Path, cfg: Config, mesh: Mesh, step: int | None = None) -> Any:
    """Only the parameters, for sampling or evaluation; nothing else is read from disk.

    Args:     cfg: `load_config(run_dir)` with the parallel section of `mesh`.
              step: a saved step. None: the latest.
    Returns:  the parameters in running order, float32, sharded as `state.state_shardings`.
    Raises:   ConfigError when the model differs from the checkpoint's, before an array is read;
              ValueError when the checkpoint lacks a parameter.
    """
    saved = read_saved(run_dir, step)
    _check_fields(cfg, saved, MODEL_FIELDS + LORA_FIELDS, "set it back")
    target = {"params": _target(cfg, mesh).params}
    loaded = _load(run_dir, saved.step, target, partial=True)
    # What the checkpoint lacks comes back as it was asked for: abstract, without a word.
    missing = [name for name, leaf in flat(loaded).items() if not isinstance(leaf, jax.Array)]
    if missing:
        raise ValueError(f"{saved} of {run_dir} lacks {', '.join(missing)}")
    return to_running(TrainState(step=(), opt_state=(), **loaded), cfg).params


def _target(cfg: Config, mesh: Mesh) -> TrainState:
    """The state to load: shapes, dtypes and shardings. Also rebuilds optax's named tuples."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_state(cfg),
        state_shardings(cfg, mesh),
    )


def _with_saved_dtypes(cfg: Config, saved: Saved) -> Config:
    """The config with the moments' dtypes of a checkpoint. (Orbax would convert without a word.)"""
    then = _by_path(dataclasses.asdict(Config())) | _by_path(saved.config)
    return replace(cfg, **{path: then[path] for path in MOMENT_DTYPES})


def _load(run_dir: str | Path, step: int, target: Any, partial: bool = False) -> Any:
    """The arrays that `target` describes; without `partial`, the checkpoint must hold no others."""
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    # Orbax would read all the shards of this process at once. It refuses a read beyond its limit,
    # and none is larger than an array.
    largest = max(a.size * a.dtype.itemsize for a in jax.tree.leaves(target))
    context.memory.read_concurrent_bytes = READ_AHEAD + largest
    with context:
        return ocp.load(folder(run_dir) / str(step), target)


def _check_fields(cfg: Config, saved: Saved, paths: Iterable[str], fix: str) -> None:
    changed = changed_fields(cfg, saved)
    for path in paths:
        if path in changed:
            then, now = changed[path]
            raise ConfigError(path, now, f"{saved} has {then!r}", f"{fix} to {then!r}")


def _by_path(config: dict[str, Any]) -> dict[str, Any]:
    """{"section.field": value} from a config as JSON."""
    return {f"{name}.{key}": v for name, section in config.items() for key, v in section.items()}
