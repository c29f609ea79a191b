"""What people ask of checkpoints: which are there, are they whole, and in what two differ."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint import integrity, store
from jaxpar.checkpoint.saved import damage, folder, read_saved, saved_steps
from jaxpar.config import ConfigError
from jaxpar.runtime.progress import meter, size
from jaxpar.sharding.axes import AXES

#: How a line says that something is wrong.
DAMAGED = "DAMAGED"


@dataclass(frozen=True)
class CheckpointRow:
    """A line of `ls`."""

    step: int
    date: str
    num_bytes: int
    mesh: str
    check: str
    """What is wrong without reading an array, or what it can be compared with."""

    def __str__(self) -> str:
        return f"{self.step:>9}  {self.date}  {size(self.num_bytes):>10}  {self.mesh}  {self.check}"


#: Seconds after which a step with something wrong is looked at again: is it being deleted?
SETTLE_SECONDS = 0.2


def rows(run_dir: str | Path) -> Iterator[CheckpointRow]:
    """Every checkpoint of a run, ascending; but those that the run deletes meanwhile.

    Raises:   ConfigError when there is none.
    """
    for step in _steps(run_dir, None):
        row = _row_if_kept(run_dir, step)
        if row is not None:
            yield row


def _row_if_kept(run_dir: str | Path, step: int) -> CheckpointRow | None:
    """The line of a checkpoint; None when it is deleted meanwhile.

    Where something is wrong, it is looked at until no more of it goes: deleting takes a while.
    """
    at = folder(run_dir) / str(step)
    while True:
        before, row, failure = _paths(at), None, None
        try:
            row = _row(run_dir, step)
        except (FileNotFoundError, ConfigError) as error:
            failure = error
        if row is not None and not row.check.startswith(DAMAGED):
            return row
        time.sleep(SETTLE_SECONDS)
        if not at.exists():
            return None
        if before <= _paths(at):
            break
    if failure is not None:
        raise failure
    return row


def _row(run_dir: str | Path, step: int) -> CheckpointRow:
    """Raises:   FileNotFoundError or ConfigError when it is gone."""
    at = folder(run_dir) / str(step)
    files = [file.stat() for file in _paths(at) if file.is_file()]
    date = datetime.fromtimestamp(at.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    found, mesh = damage(run_dir, step), "?"
    if found:
        check = f"{DAMAGED}: {found[0]}"
    else:
        saved = read_saved(run_dir, step)
        mesh, check = _mesh(saved.config["parallel"]), _witnesses(at, len(saved.fingerprints))
    return CheckpointRow(step, date, sum(file.st_size for file in files), mesh, check)


def _paths(place: Path) -> set[Path]:
    """All that is in a folder, and in those within; what goes meanwhile is left out."""
    return {Path(at, name) for at, *names in os.walk(place) for name in itertools.chain(*names)}


def _mesh(parallel: dict[str, Any]) -> str:
    """The mesh that wrote a checkpoint, as `mesh.describe` tells it."""
    named = [f"{axis}={parallel.get(axis, 1)}" for axis in AXES if parallel.get(axis, 1) != 1]
    return " ".join(named) or "1 device"


def _witnesses(step_folder: Path, arrays: int) -> str:
    files = "files as listed" if integrity.has_file_list(step_folder) else "no list of files"
    return f"{files}, {arrays} arrays with fingerprints" if arrays else "no fingerprints"


def verify(run_dir: str | Path, step: int | None, log: Callable[[str], None]) -> bool:
    """Read every byte of a run's checkpoints, or of one, and compare; whether all are whole.

    Memory stays at a few times the largest piece that an array is stored in.

    Args:     log: called with the outcome of each, and everything that is wrong.
    Raises:   ConfigError when there is no such checkpoint; Unreadable.
    """
    whole = True
    for at in _steps(run_dir, step):
        found = damage(run_dir, at)
        known = {} if found else read_saved(run_dir, at).fingerprints
        found += _array_damage(folder(run_dir) / str(at), known, log)
        for text in found:
            log(f"step {at}: {text}")
        for name in integrity.extra_files(folder(run_dir) / str(at)):
            log(f"step {at}: note: {name} is not of this checkpoint, and is not read")
        whole &= not found
        unknown = "nothing to compare arrays with: of an earlier version"
        log(f"step {at}: {DAMAGED if found else 'whole' if known else unknown}")
    return whole


def _array_damage(step_folder: Path, known: dict[str, str], log: Callable[[str], None]) -> list:
    """What is wrong with the arrays: all are read, also those without fingerprints."""
    found, arrays = [], {}
    try:
        names = store.array_names(step_folder)
    except Exception as error:  # whatever is made of a damaged file
        return [f"its arrays cannot be listed ({_reason(step_folder, error)})"]
    found += [f"{name} is missing" for name in known if name not in names]
    for name in names:
        try:
            arrays[name] = store.open_array(step_folder, name)
        except Exception as error:
            found.append(f"{name} cannot be opened ({_reason(step_folder, error)})")
    with meter(sum(map(store.num_bytes, arrays.values()))) as progress:
        for name, array in arrays.items():
            try:
                sums = store.fingerprint_of(array)
            except Exception as error:
                found.append(f"{name} cannot be read ({_reason(step_folder, error)})")
                continue
            found += integrity.describe_differences(known, {name: sums}) if known else []
            progress.advance(store.num_bytes(array))
        largest = max(map(store.num_bytes, arrays.values()), default=0)
        log(f"{step_folder}: read {progress.summary(largest)}")
    return found


def _reason(step_folder: Path, error: Exception) -> str:
    """What is wrong, in one line. Raises:   Unreadable when that is this machine."""
    integrity.refuse_trouble(str(step_folder), error)
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


def differences(
    one: tuple[str, int | None], other: tuple[str, int | None], log: Callable[[str], None]
) -> int:
    """Say in which arrays two checkpoints differ, and by how much; how many do.

    Args:     one, other: run folder, and step or None for the latest.
    Raises:   ConfigError when there is no such checkpoint, or both are one; Damaged or Unreadable
              when one cannot be read.
    """
    places = [folder(run) / str(_steps(run, step)[-1]) for run, step in (one, other)]
    if places[0].resolve() == places[1].resolve():
        rule = f"would be compared with itself: both are step {places[0].name}"
        rule += ", the latest" if None in (one[1], other[1]) else ""
        raise ConfigError("diff", str(one[0]), rule, "give --step or --other-step, or RUN2")
    names = [_array_names(place) for place in places]
    count = 0
    for name in sorted(names[0] | names[1]):
        missing = [str(p) for p, there in zip(places, names, strict=True) if name not in there]
        text = f"is not in {missing[0]}" if missing else _difference(places, name)
        count += text is not None
        if text is not None:
            log(f"{name:<40} {text}")
    log(f"{count} of {len(names[0] | names[1])} arrays differ: {places[0]}, {places[1]}")
    return count


@contextlib.contextmanager
def _reading(place: Path, what: str) -> Iterator[None]:
    """Raises:   Damaged that says what is wrong, for whatever is made of a damaged file; or
    Unreadable."""
    try:
        yield
    except Exception as error:
        raise integrity.Damaged(str(place), [f"{what} ({_reason(place, error)})"]) from error


def _array_names(place: Path) -> set[str]:
    with _reading(place, "its arrays cannot be listed"):
        return set(store.array_names(place))


def _opened(place: Path, name: str) -> Any:
    with _reading(place, f"{name} cannot be opened"):
        return store.open_array(place, name)


def _piece(place: Path, name: str, array: Any, box: Any) -> np.ndarray:
    with _reading(place, f"{name} cannot be read"):
        return np.ascontiguousarray(array[box].read().result())


def _difference(places: list[Path], name: str) -> str | None:
    """How far apart two arrays are, piece by piece; None when every bit is the same."""
    a, b = arrays = [_opened(place, name) for place in places]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype.name}{list(a.shape)}, not {b.dtype.name}{list(b.shape)}"
    largest, squares, scale, count, bits = 0.0, 0.0, 0.0, 0, False
    for box in store.pieces(a):
        x, y = (_piece(at, name, array, box) for at, array in zip(places, arrays, strict=True))
        bits |= x.tobytes() != y.tobytes()
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = x.astype(np.float64), y.astype(np.float64)
            gap = np.where(x == y, 0.0, np.abs(x - y))
        largest = max(largest, float(gap.max(initial=0.0)))
        squares, scale = squares + float((gap**2).sum()), scale + float((x**2).sum())
        count += int((gap != 0).sum())
    if not bits:
        return None
    total = int(np.prod(a.shape, dtype=np.int64))
    relative = (squares / scale) ** 0.5 if scale else float("inf")
    return f"{count:,} of {total:,} differ, by {largest:.3g} at most, {relative:.3g} of the norm"


def _steps(run_dir: str | Path, step: int | None) -> list[int]:
    """The steps to look at.

    Raises:   ConfigError when there is none, or not this one.
    """
    steps = saved_steps(run_dir) if Path(run_dir).is_dir() else []
    if not steps:
        raise ConfigError("RUN", str(run_dir), "holds no checkpoint", "give the folder of a run")
    if step is None:
        return steps
    if step not in steps:
        held = ", ".join(map(str, steps))
        raise ConfigError("--step", step, f"is no checkpoint of {run_dir}", f"use one of {held}")
    return [step]
