"""Averages the weights of several checkpoints of a run, box by box.

The average of checkpoints near the end of training often has a lower loss than any of them. The
result is a run with only weights, like an imported one: it can be sampled, evaluated, converted,
and trained further by `run.init_from`.

Source:   Izmailov et al. 2018 (1803.05407).
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpar
from jaxpar.checkpoint import integrity, weights_alone
from jaxpar.checkpoint.branching import intact
from jaxpar.checkpoint.saved import (
    CARRIED,
    NO_DATASET,
    Saved,
    checkpoint_folder,
    read_whole,
    saved_steps,
)
from jaxpar.checkpoint.stored_arrays import array_names, num_bytes, open_array, reading
from jaxpar.config import ConfigError, replace
from jaxpar.config.schema.optimizer import AVERAGED, TRAINED, Weights
from jaxpar.config.serialize import from_values, to_json
from jaxpar.config.values import to_values
from jaxpar.runtime.files.atomic import new_folder
from jaxpar.runtime.files.outputs import refuse_used, require_space
from jaxpar.runtime.progress import Meter, meter
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import grid

type Arrays = dict[str, tuple[str, Any]]
"""By the path of a parameter: the name and the TensorStore array of its values."""


@dataclass(frozen=True)
class AveragedCheckpoint:
    """A checkpoint whose weights are averaged."""

    folder: Path
    """Of its files."""
    fingerprints: Mapping[str, str]
    """Of its arrays, by name."""


def average(
    run: str,
    new: str,
    log: Callable[[str], None],
    *,
    steps: Sequence[int] = (),
    last: int | None = None,
    weights: Weights = TRAINED,
) -> list[Saved]:
    """Write the average of checkpoints of a run to a new folder, which appears when it is complete.

    Args:     steps: of the checkpoints. (): the latest intact one. last: number of checkpoints, the
              last ones. weights: those that are trained, or
              their moving averages.
    Returns:  the metadata of what was averaged.
    Raises:   ConfigError if the new folder is in use, or a checkpoint is missing; Damaged;
              Unreadable.
    """
    refuse_used("NEW", Path(new))
    chosen = _chosen(run, steps, last)
    parts = [read_whole(run, step, lambda at: intact(run, at)) for step in chosen]
    _check(run, parts, weights)
    sources = [
        AveragedCheckpoint(checkpoint_folder(run) / str(part.step), part.fingerprints)
        for part in parts
    ]
    arrays = [opened_weights(source, weights) for source in sources]
    require_space("NEW", Path(new), sum(4 * math.prod(a.shape) for _, a in arrays[0].values()))
    cfg = from_values(parts[0].config)
    at = [part.step for part in parts]
    about = {
        "averaged_from": {"run": run, "steps": at, "weights": weights},
        "config": to_values(cfg),
        "dataset": NO_DATASET,
        "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        "tokens_seen": 0,
    }
    with new_folder(Path(new)) as made:
        write_average(made, sources, arrays, about, log)
        (made / "config.json").write_text(to_json(replace(cfg, **{"run.dir": new})))
        if (Path(run) / CARRIED).is_dir():
            shutil.copytree(Path(run) / CARRIED, made / CARRIED)
    what = "the moving averages of " * (weights == AVERAGED) + "steps " + ", ".join(map(str, at))
    log(f"average    {new}: {what} of {run}")
    return parts


def _chosen(run: str, steps: Sequence[int], last: int | None) -> Sequence[int | None]:
    """Return the step of each checkpoint; None for the latest intact one.

    Raises:   ConfigError for too few checkpoints, and for a step that is named twice.
    """
    if last is None:
        if twice := [step for step in steps if steps.count(step) > 1]:
            rule = f"names step {twice[0]} twice"
            raise ConfigError("--steps", " ".join(map(str, steps)), rule, "name it once")
        return steps or (None,)
    if steps:
        rule, fix = "chooses the checkpoints, as --steps does", "leave one of them out"
        raise ConfigError("--last", last, rule, fix)
    there = saved_steps(run)
    if len(there) < last:
        rule = f"{run} has {len(there)} checkpoints"
        fix = f"use --last {len(there)}, or keep more: --checkpoint.keep"
        raise ConfigError("--last", last, rule, fix)
    return there[-last:]


def _check(run: str, parts: Sequence[Saved], weights: Weights) -> None:
    """Raises:   ConfigError for a single checkpoint, and for adapters."""
    averages = weights == AVERAGED
    if len(parts) == 1 and not averages:
        fix = f"use --last 2, or --weights {AVERAGED} for the moving average of one"
        raise ConfigError("RUN", run, "is averaged over a single checkpoint", fix)
    if parts[0].config.get("lora"):
        rule = "has adapters, whose average is not that of the weights with them"
        fix = "merge them into the weights first: python -m jaxpar.convert to-hf, then from-hf"
        raise ConfigError("RUN", run, rule, fix)
    if without := [part for part in parts if averages and not part.has_average]:
        rule = f"step {without[0].step} of {run} has no moving average of the weights"
        raise ConfigError("--weights", weights, rule, f"use --weights {TRAINED}")


def opened_weights(source: AveragedCheckpoint, weights: Weights) -> Arrays:
    """Open the weights of a checkpoint.

    Args:     weights: AVERAGED takes the moving average of those that have one.
    Raises:   Damaged; Unreadable.
    """
    found: Arrays = {}
    with reading(source.folder, "its arrays cannot be listed"):
        names = set(array_names(source.folder))
    for path in sorted(n.removeprefix("params/") for n in names if n.startswith("params/")):
        name = f"{weights}/{path}"
        name = name if weights == AVERAGED and name in names else f"params/{path}"
        with reading(source.folder, f"{name} cannot be opened"):
            found[path] = name, open_array(source.folder, name)
    return found


def write_average(
    run_dir: Path,
    sources: Sequence[AveragedCheckpoint],
    weights: Sequence[Arrays],
    about: dict[str, Any],
    log: Callable[[str], None],
) -> None:
    """Write a run with one checkpoint, whose weights are the average of those of the sources.

    The sum is computed in float64 and stored in float32. Needs memory for a few of the largest
    chunks of the first source.

    Args:     weights: from `opened_weights`, of each source. about: fields of `Saved`. log: called
              with the size and speed of reading.
    Raises:   Damaged when an array is missing, or differs from what was saved; Unreadable.
    """
    first = {path: array for path, (_, array) in weights[0].items()}
    for source, own in zip(sources, weights, strict=True):
        _check_shapes(source, own, first)
    shapes = {path: tuple(array.shape) for path, array in first.items()}
    chunks = {path: _chunk(array) for path, array in first.items()}
    made, found = weights_alone.create(run_dir, shapes, chunks, about), {}
    with meter(sum(num_bytes(a) for own in weights for _, a in own.values())) as progress:
        for path in first:
            of_path = [own[path] for own in weights]
            boxes = grid(shapes[path], chunks[path])
            found[path] = _average(made[path], boxes, sources, of_path, progress)
        log(f"read {progress.summary(max(map(num_bytes, first.values())))}")
    weights_alone.seal(run_dir, about, found)


def _average(
    into: Any,
    boxes: Any,
    sources: Sequence[AveragedCheckpoint],
    arrays: Sequence[tuple[str, Any]],
    progress: Meter,
) -> RunningFingerprint:
    """Write the average of an array, verify what was read, and return its fingerprint."""
    new, own = RunningFingerprint(into.shape), [RunningFingerprint(into.shape) for _ in sources]
    for box in boxes:
        origin, total = [part.start for part in box], np.zeros((), np.float64)
        for source, (name, array), sums in zip(sources, arrays, own, strict=True):
            with reading(source.folder, f"{name} cannot be read"):
                values = np.ascontiguousarray(array[box].read().result())
            sums.add(values, origin)
            total = total + values.astype(np.float64)
            progress.advance(values.nbytes)
        mean = (total / len(sources)).astype(np.float32)
        into[box].write(mean).result()
        new.add(mean, origin)
    for source, (name, _), sums in zip(sources, arrays, own, strict=True):
        if wrong := integrity.describe_differences(source.fingerprints, {name: str(sums)}):
            raise integrity.Damaged(str(source.folder), wrong)
    return new


def _check_shapes(source: AveragedCheckpoint, own: Arrays, first: Mapping[str, Any]) -> None:
    """Raises:   Damaged when arrays are missing, or have other shapes than those of the first."""
    wrong = [f"it does not contain params/{path}" for path in first if path not in own]
    wrong += [f"params/{path} does not belong to the model" for path in own if path not in first]
    for path in (path for path in first if path in own):
        here, there = tuple(own[path][1].shape), tuple(first[path].shape)
        if here != there:
            wrong.append(f"params/{path} has shape {here}, not {there}")
    if wrong:
        raise integrity.Damaged(str(source.folder), wrong)


def _chunk(array: Any) -> tuple[int, ...]:
    return tuple(array.chunk_layout.read_chunk.shape or array.shape)
