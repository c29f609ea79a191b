"""Averages the arrays of several checkpoints box by box, and writes them as weights alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint import integrity, store, weights_alone
from jaxpar.checkpoint.reading import array_names, opened, piece
from jaxpar.runtime.progress import Meter, meter
from jaxpar.sharding.fingerprint import RunningFingerprint
from jaxpar.sharding.grid import grid

type Weights = dict[str, tuple[str, Any]]
"""By the path of a parameter: the name and the TensorStore array of its values."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, and its share of the average."""

    folder: Path
    """Of its files."""
    share: float
    fingerprints: Mapping[str, str]
    """Of its arrays, by name; empty if an earlier version saved none."""


def opened_weights(source: Source, ema: bool) -> Weights:
    """Open the weights of a checkpoint.

    Args:     ema: take the moving average of those that have one.
    Raises:   Damaged; Unreadable.
    """
    names, found = array_names(source.folder), {}
    for path in sorted(n.removeprefix("params/") for n in names if n.startswith("params/")):
        averaged = f"ema/{path}"
        name = averaged if ema and averaged in names else f"params/{path}"
        found[path] = name, opened(source.folder, name)
    return found


def write_average(
    run_dir: Path,
    sources: Sequence[Source],
    weights: Sequence[Weights],
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
    with meter(sum(store.num_bytes(a) for own in weights for _, a in own.values())) as progress:
        for path in first:
            of_path = [own[path] for own in weights]
            boxes = grid(shapes[path], chunks[path])
            found[path] = _average(made[path], boxes, sources, of_path, progress)
        log(f"read {progress.summary(max(map(store.num_bytes, first.values())))}")
    weights_alone.seal(run_dir, about, found)


def _average(
    into: Any,
    boxes: Any,
    sources: Sequence[Source],
    arrays: Sequence[tuple[str, Any]],
    progress: Meter,
) -> RunningFingerprint:
    """Write the average of an array, verify what was read, and return its fingerprint."""
    new, own = RunningFingerprint(into.shape), [RunningFingerprint(into.shape) for _ in sources]
    for box in boxes:
        origin, total = [part.start for part in box], np.zeros((), np.float64)
        for source, (name, array), sums in zip(sources, arrays, own, strict=True):
            values = piece(source.folder, name, array, box)
            sums.add(values, origin)
            total = total + source.share * values.astype(np.float64)
            progress.advance(values.nbytes)
        average = total.astype(np.float32)
        into[box].write(average).result()
        new.add(average, origin)
    for source, (name, _), sums in zip(sources, arrays, own, strict=True):
        if source.fingerprints:
            found = {name: str(sums)}
            if wrong := integrity.describe_differences(source.fingerprints, found):
                raise integrity.Damaged(str(source.folder), wrong)
    return new


def _check_shapes(source: Source, own: Weights, first: Mapping[str, Any]) -> None:
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
