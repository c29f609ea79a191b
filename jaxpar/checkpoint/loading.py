"""Loads a checkpoint onto any mesh, if the run may resume from it; verifies fingerprints."""

import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint import by_place, integrity, of_replicas, stored_arrays
from jaxpar.checkpoint.by_place import LayerPlaces, Load, ShapeOf
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import (
    LORA_FIELDS,
    MODEL_FIELDS,
    NO_DATASET,
    STORAGE_FIELDS,
    Saved,
    by_path,
    check_fields,
    checkpoint_folder,
    none_whole,
    read_saved,
    require_weights,
    saved_steps,
)
from jaxpar.config import Config, ConfigError, default_of, flag, replace, value_of
from jaxpar.config.addresses import may_change
from jaxpar.config.listed import written
from jaxpar.config.lists.step_sizes import BATCHES, LENGTHS, step_sizes
from jaxpar.config.rules.guard import scales_loss
from jaxpar.config.schema.optimizer import AVERAGED, TRAINED, EmaConfig, Weights
from jaxpar.config.serialize import field_from_values
from jaxpar.config.values import OF_STEPS, require_code, to_values
from jaxpar.data.sources import fingerprint
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.sharding.fingerprint import fingerprints, named_leaves
from jaxpar.step.diloco.trainers import num_trainers
from jaxpar.step.feature import Feature
from jaxpar.step.features import features_of
from jaxpar.step.state import (
    TrainState,
    abstract_weights,
    averaged,
    extra_specs,
    initial_extra,
    to_running,
)

#: Fields that may not change during a run: the meaning of the moments, the order of the data, and
#: roundings to 8 bits.
RUN_FIELDS = (
    *("optimizer.name", "train.seed", "data.seq_len"),
    *("compute.matmul_dtype", "compute.float8_scaling"),
)

#: Fields that decide the sizes of steps. A run may change them for steps to come.
SIZE_FIELDS = ("train.global_batch_size", BATCHES, LENGTHS, "data.length_keeps")


def check_resumable(cfg: Config, saved: Saved, shape_of: ShapeOf | None = None) -> None:
    """Refuse another model, optimizer or order of the data. The mesh and all else may change.

    Layers may change if their weights have the same shapes, place by place (`by_place.py`).

    Args:     shape_of: returns the shape of a saved array. None: of the run's checkpoint.
    Raises:   ConfigError that names the first field that differs; also for imported weights.
    """
    if saved.dataset == NO_DATASET:
        rule = f"contains imported weights in {saved}, without an optimizer state to resume"
        raise ConfigError("run.dir", cfg.run.dir, rule, "use a new run.dir")
    fixed = LORA_FIELDS + RUN_FIELDS
    if not (cfg.train.batch_schedule or saved.config["train"].get("batch_schedule")):
        fixed += ("train.global_batch_size",)
    fix = "use a new run.dir, or set it back"
    places = check_model(cfg, saved, cfg.run.dir, fix, shape_of)
    before, number = map(len, places.names)
    if before != number:
        rule = f"{saved} has {before} layers, and a run that continues has as many"
        fix_number = f"set it back to {before}, or use a new run.dir with run.init_from"
        raise ConfigError("model.num_layers", number, rule, fix_number)
    check_fields(cfg, saved, fixed, fix)
    _check_sizes(cfg, saved)
    now = fingerprint(cfg)
    if now != saved.dataset:
        rule = f"is not the data of {saved} (fingerprint {now[:8]}, not {saved.dataset[:8]})"
        field = "mixture" if cfg.data.mixture else "path"
        then = _then(saved, "data.mixture") or _then(saved, "data.path")
        fix = f"use a new run.dir, or set it back to {written(then)}"
        raise ConfigError(f"data.{field}", getattr(cfg.data, field), rule, fix)
    _check_stages(cfg, saved)


def check_model(
    cfg: Config,
    saved: Saved,
    run_dir: str | Path,
    fix: str,
    shape_of: ShapeOf | None = None,
) -> LayerPlaces:
    """Check that a model can have the weights of a checkpoint. Returns the places of its layers.

    Args:     shape_of: as for `check_resumable`; None: of the checkpoint in `run_dir`.
    Raises:   ConfigError for the first field that differs, or weight of another shape.
    """
    places = LayerPlaces.of(cfg, saved.config)
    check_fields(cfg, saved, MODEL_FIELDS, fix)
    of_another_run = str(run_dir) != cfg.run.dir
    places.check_changes(
        str(saved), fix, functools.partial(may_change, cfg) if of_another_run else None
    )
    if places.moved:
        stored = checkpoint_folder(run_dir) / str(saved.step)
        shape_of = shape_of or (lambda name: stored_arrays.open_array(stored, name).shape)
        by_place.check_shapes(cfg, places, saved.fingerprints, shape_of, str(saved))
    return places


def _then(saved: Saved, path: str) -> Any:
    """Return the value of a field in a checkpoint's config."""
    found = by_path(saved.config)
    return field_from_values(path, found[path]) if path in found else default_of(path)


def _check_sizes(cfg: Config, saved: Saved) -> None:
    """Raises:   ConfigError if steps before the saved one had another size."""
    fields = {path: _then(saved, path) for path in SIZE_FIELDS}
    batches = saved.step + sum(count for _, count in saved.skipped_batches)
    past, now = (list(step_sizes(one).until(batches)) for one in (replace(cfg, **fields), cfg))
    if past != now:
        changed = [path for path in SIZE_FIELDS if value_of(cfg, path) != fields[path]]
        path = next((one for one in changed if one in (BATCHES, LENGTHS)), changed[0])
        rule = f"changes the size of steps before step {saved.step}, after which {saved} continues"
        before = " ".join(flag(one, fields[one]) for one in changed)
        fix = f"use {before}, or change only later steps"
        raise ConfigError(path, value_of(cfg, path), rule, fix)


def _check_stages(cfg: Config, saved: Saved) -> None:
    """Raises:   ConfigError if sources had other weights before the saved step."""
    path = "data.mixture_schedule"
    then = _then(saved, path)
    past, now = (
        [stage for stage in stages if stage.step < saved.step]
        for stages in (then, cfg.data.mixture_schedule)
    )
    if past != now:
        rule = f"changes weights before step {saved.step}, after which {saved} continues"
        fix = f"use {flag(path, then)}, or change only later steps"
        raise ConfigError(path, cfg.data.mixture_schedule, rule, fix)


#: Bytes that are read ahead and kept on the host until they are on a device, in addition to those
#: of the largest array.
READ_AHEAD = 4 << 30

#: Errors of a load that do not indicate damage. `integrity.reading_checkpoint` classifies errors
#: of the operating system.
NOT_DAMAGE = (ConfigError, integrity.Unreadable, MemoryError, jax.errors.JaxRuntimeError)


def restore_latest(cfg: Config, mesh: Mesh) -> tuple[TrainState, int]:
    """Restore the run's latest intact checkpoint. Returns the state and its step.

    Process 0 moves later, damaged checkpoints to RUN/damaged, with a warning, and earlier ones
    whose metadata is damaged.

    Raises:   ConfigError as `check_resumable`; Damaged when none is intact; Unreadable for an error
              of the machine. In both cases, all checkpoints stay in place.
    """
    found: dict[int, Damaged] = {}
    for step in reversed(saved_steps(cfg.run.dir)):
        try:
            state = restore(cfg, mesh, step)
        except Damaged as error:
            found[step] = error
            continue
        # Orbax cannot save beside an earlier step whose metadata cannot be read.
        for other, why in (found | _without_metadata(cfg, step)).items():
            _set_aside(cfg, other, why, f"the run resumes from step {step}")
        peers.any_process(False)  # they are moved before any process writes
        return state, step
    raise none_whole(cfg.run.dir, {step: error.damage for step, error in found.items()})


def _without_metadata(cfg: Config, before: int) -> dict[int, Damaged]:
    """Return the checkpoints before a step whose metadata is damaged."""
    found = {}
    for step in (step for step in saved_steps(cfg.run.dir) if step < before):
        try:
            read_saved(cfg.run.dir, step)
        except Damaged as error:
            found[step] = error
        except ConfigError:
            pass  # jaxpar did not write it
    return found


def _set_aside(cfg: Config, step: int, why: Damaged, instead: str) -> None:
    if jax.process_index() == 0:
        place = integrity.set_aside(
            cfg.run.dir, checkpoint_folder(cfg.run.dir) / str(step), str(why)
        )
        warn(f"{why}\n           It was moved to {place}; {instead}.")


def restore(cfg: Config, mesh: Mesh, step: int | None = None) -> TrainState:
    """Restore the run's state onto this mesh, from a checkpoint of any mesh.

    Args:     step: a saved step. None: the latest.
    Returns:  the running state, sharded as `state.state_shardings(cfg, mesh)`. Moments saved in
              another dtype are converted, by rounding to nearest. A moving average
              that was not saved begins with the weights. Another number of DiLoCo's replicas than
              before starts from the outer weights. Errors of compressed sums, and an outer gradient
              under way: `of_replicas/`.
    Raises:   ConfigError as `check_resumable`, before an array is read, and for a missing step;
              Damaged when any array differs from what was saved.
    """
    saved = read_saved(cfg.run.dir, step)
    load = lambda target, partial: _load_whole(cfg.run.dir, saved, target, partial)  # noqa: E731
    return restore_from(cfg, mesh, saved, load)


def restore_from(
    cfg: Config, mesh: Mesh, saved: Saved, load: Load, shape_of: ShapeOf | None = None
) -> TrainState:
    """`restore`, wherever the arrays are.

    Args:     load: returns the arrays, verified, that a tree of abstract arrays with shardings
              describes; its second argument tells that there may be others. shape_of: as for
              `check_resumable`.
    """
    require_code(cfg, OF_STEPS)
    check_resumable(cfg, saved, shape_of)
    stored = _with_saved_dtypes(cfg, saved)
    saved, load = by_place.by_place(stored, saved, load)
    target = of_replicas.abstract_saved(stored, mesh, saved).saved
    begins = [name for name in target if name in _own_extra(stored) and not _has(saved, name)]
    for name in begins:
        del target[name]
    scalars = target["guard"]
    errors = target.pop("feedback", ())
    more_exchanged = False
    if "diloco" in target:
        target["diloco"], more_exchanged = of_replicas.exchange_to_load(
            target["diloco"], saved, cfg
        )
    if used := of_replicas.feedback_to_load(errors, saved, cfg):
        target["feedback"] = used
    # What the checkpoint then has in vain.
    gone = {name.partition("/")[0] for name in saved.fingerprints} - target.keys()
    for name in sorted(gone.difference(Feature.names)):
        peers.log(f"the state of {name} in {saved} is dropped: the run has no such post-update")
    ends = bool(gone)
    ends = ends or of_replicas.has_feedback(saved)
    others = of_replicas.saved_trainers(saved) != num_trainers(cfg)  # whose weights are not read
    loaded = load(target, ends or others or more_exchanged)
    loaded["feedback"] = of_replicas.adapted(loaded.get("feedback", {}), errors, saved, cfg)
    if (by_path(saved.config).get("compute.dtype") == "float16") != scales_loss(cfg):
        to = jax.tree.map(lambda a: a.sharding, scalars)
        fresh = jax.device_put(of_replicas.initial_guard(cfg, saved), to)  # of another scale
        loaded["guard"] = fresh | {"skipped": loaded["guard"]["skipped"]}
    if int(loaded["step"]) != saved.step:
        raise Damaged(str(saved), [f"it contains the state of step {int(loaded['step'])}"])
    state = of_replicas.converted(TrainState.of(loaded), cfg, stored, mesh, saved)
    state = to_running(state, cfg)
    errors = of_replicas.with_feedback(state.extra.get("feedback", ()), cfg, mesh)
    state = state.with_extra(feedback=errors)
    state = of_replicas.with_exchange(state, saved, cfg, mesh)
    words = {feature.name: feature.begins for feature in features_of(cfg)}
    for name in begins:
        peers.log(f"{words[name] or f'{name} starts anew after'} step {saved.step}")
    return state.with_extra(**initial_extra(state.params, cfg, mesh, begins))


def _own_extra(cfg: Config) -> dict[str, Any]:
    """Return the specs of the state of features, but for what is loaded in a special way."""
    special = ("guard", "feedback")
    return {name: specs for name, specs in extra_specs(cfg).items() if name not in special}


def _has(saved: Saved, name: str) -> bool:
    return any(path.startswith(name + "/") for path in saved.fingerprints)


def restore_params(
    run_dir: str | Path,
    cfg: Config,
    mesh: Mesh,
    step: int | None = None,
    weights: Weights = TRAINED,
) -> Any:
    """Restore only the parameters, for sampling or evaluation. Nothing else is read or verified.

    Args:     cfg: `load_config(run_dir)` with the parallel section of `mesh`.
              step: a saved step. None: the latest. weights: those that are trained, or
              their moving average.
    Returns:  the parameters in running order, float32, sharded as `state.state_shardings`, on the
              device.
    Raises:   ConfigError when the model differs from the checkpoint's, or it has no such weights,
              before an array is read; Damaged when a parameter is missing, or differs from what was
              saved.
    """
    saved = read_saved(run_dir, step)
    check_model(cfg, saved, run_dir, "set it back")
    check_fields(cfg, saved, LORA_FIELDS, "set it back")
    require_weights(run_dir, saved, weights)
    average = EmaConfig() if weights == AVERAGED else None
    with_average = replace(cfg, **{"optimizer.ema": average, "optimizer.offload_masters": False})
    stored = _with_saved_dtypes(with_average, saved)
    load = lambda target, partial: _load_whole(run_dir, saved, target, partial)  # noqa: E731
    _, load_by_place = by_place.by_place(stored, saved, load)
    loaded = {"params": {}} | load_by_place(abstract_weights(stored, mesh), True)
    state = to_running(TrainState.of(loaded), cfg)
    return state.params if weights == TRAINED else averaged(state, cfg)


def _load_whole(run_dir: str | Path, saved: Saved, target: Any, partial: bool = False) -> Any:
    """Load the arrays that `target` describes, and verify their fingerprints.

    Raises:   Damaged, in all processes if in one; Unreadable.
    """
    where, step_folder = f"{saved} of {run_dir}", checkpoint_folder(run_dir) / str(saved.step)
    first = jax.process_index() == 0
    agree(where, integrity.file_damage(step_folder) if first else [])
    for name in integrity.extra_files(step_folder) if first else []:
        warn(f"{where}: {name} does not belong to this checkpoint, and is ignored")
    loaded, damage = None, []
    try:
        with integrity.reading_checkpoint(where):
            loaded = _load(step_folder, target, partial)
    except NOT_DAMAGE:
        raise
    except Exception as error:  # Orbax can raise any error on a damaged file
        reason = (str(error) or type(error).__name__).partition("\n")[0][:300]
        damage = [f"it cannot be read ({reason})"]
    # For an array missing in the checkpoint, Orbax returns the abstract array without an error.
    leaves = named_leaves(loaded) if partial and not damage else {}
    missing = [name for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    agree(where, damage + ([f"it does not contain {', '.join(missing)}"] if missing else []))
    verify(where, saved, loaded)
    return loaded


def verify(where: str, saved: Saved, loaded: Any) -> None:
    """Compare arrays with the fingerprints of what was saved, on the devices that hold them.

    Raises:   Damaged, in all processes if in one.
    """
    agree(where, integrity.describe_differences(saved.fingerprints, fingerprints(loaded)))


def agree(where: str, damage: list[str]) -> None:
    """Agree among all processes whether the checkpoint is damaged.

    Raises:   Damaged in all processes, if one has found damage.
    """
    if peers.any_process(bool(damage)) and not damage:
        damage = ["another process reports it"]
    if damage:
        raise Damaged(where, damage)


def _with_saved_dtypes(cfg: Config, saved: Saved) -> Config:
    """Return the config with the saved dtypes of the state. (Orbax would convert silently.)"""
    then = by_path(to_values(Config())) | by_path(saved.config)
    both = [p for p in STORAGE_FIELDS if then[p] is not None and value_of(cfg, p) is not None]
    return replace(cfg, **{path: then[path] for path in both})


def _load(step_folder: Path, target: Any, partial: bool) -> Any:
    """Load the arrays that `target` describes. Without `partial`, there must be no others."""
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    # By default, Orbax reads all shards of this process at once. It refuses a single read above the
    # limit, and no read is larger than an array.
    largest = max(a.size * a.dtype.itemsize for a in jax.tree.leaves(target))
    context.memory.read_concurrent_bytes = READ_AHEAD + largest
    with context:
        return ocp.load(step_folder, target)
