"""Inspects checkpoints: lists them, and verifies them."""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import integrity, store
from jaxpar.checkpoint.best import Best, of
from jaxpar.checkpoint.reading import reason
from jaxpar.checkpoint.saved import damage, folder, read_saved, saved_steps
from jaxpar.config import ConfigError
from jaxpar.runtime import tables
from jaxpar.runtime.progress import meter
from jaxpar.runtime.units import size
from jaxpar.sharding.axes import AXES

#: Marks a damaged checkpoint in the output.
DAMAGED = "DAMAGED"


@dataclass(frozen=True)
class CheckpointRow:
    """One line of `ls`."""

    step: int
    date: str
    num_bytes: int
    mesh: str
    check: str
    """The damage found without reading arrays, or what was verified."""

    best: str = ""
    """The metric of checkpoint.best, if it is the best checkpoint."""

    def __str__(self) -> str:
        check = f"{self.check}; best, {self.best}" if self.best else self.check
        return _line(str(self.step), self.date, size(self.num_bytes), self.mesh, check)


def _line(*cells: str) -> str:
    return tables.line(cells, widths=(9, 19, 10, 0, 0), left=(1, 3, 4))


#: The line above those of the checkpoints.
HEAD = _line("step", "date", "bytes", "mesh", "check")


#: Seconds to wait before a damaged step is checked again: it may be in the middle of deletion.
SETTLE_SECONDS = 0.2


def rows(run_dir: str | Path) -> Iterator[CheckpointRow]:
    """Yield every checkpoint of a run, ascending, except those that the run deletes meanwhile.

    Raises:   ConfigError when there is none.
    """
    steps = _steps(run_dir, None)
    best = _best(run_dir)
    for step in steps:
        row = _row_if_kept(run_dir, step)
        if row is not None:
            is_best = best is not None and best.step == step and best.value is not None
            yield dataclasses.replace(row, best=str(best)) if is_best else row


def _best(run_dir: str | Path) -> Best | None:
    """Return the best evaluation so far, unless no checkpoint is intact."""
    for step in reversed(saved_steps(run_dir)):
        with contextlib.suppress(integrity.Damaged, ConfigError):  # `_row` names the damage
            return of(read_saved(run_dir, step))
    return None


def _row_if_kept(run_dir: str | Path, step: int) -> CheckpointRow | None:
    """Return the line of a checkpoint; None if it is deleted meanwhile.

    A damaged checkpoint is checked again until no more of its files disappear: deletion takes time.
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
    files = [file.stat() for file in sorted(_paths(at)) if file.is_file()]
    date = datetime.fromtimestamp(at.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    found, mesh = damage(run_dir, step), "?"
    if found:
        check = f"{DAMAGED}: {found[0]}"
    else:
        saved = read_saved(run_dir, step)
        mesh, check = (
            mesh_in_words(saved.config["parallel"]),
            _witnesses(at, len(saved.fingerprints)),
        )
    return CheckpointRow(step, date, sum(file.st_size for file in files), mesh, check)


def _paths(place: Path) -> set[Path]:
    """Return all paths below a folder, except those deleted meanwhile."""
    return {Path(at, name) for at, *names in os.walk(place) for name in itertools.chain(*names)}


def mesh_in_words(parallel: dict[str, Any]) -> str:
    """Describe the mesh that wrote a checkpoint, as `mesh.describe` does."""
    named = [f"{axis}={parallel.get(axis, 1)}" for axis in AXES if parallel.get(axis, 1) != 1]
    return " ".join(named) or "1 device"


def _witnesses(step_folder: Path, arrays: int) -> str:
    files = "files verified" if integrity.has_file_list(step_folder) else "no file list"
    return f"{files}, {arrays} arrays with fingerprints"


def verify(run_dir: str | Path, step: int | None, log: Callable[[str], None]) -> bool:
    """Read and verify every byte of a run's checkpoints, or of one of them.

    Needs memory for a few of the largest chunks in which arrays are stored.

    Args:     log: called with the result of each checkpoint, and with all damage.
    Returns:  whether all are intact.
    Raises:   ConfigError when there is no such checkpoint; Unreadable, after the others, if one
              cannot be read and none is damaged.
    """
    whole, unread = True, list[integrity.Unreadable]()
    for at in _steps(run_dir, step):
        try:
            whole &= _verify_one(run_dir, at, log)
        except integrity.Unreadable as error:
            log(f"step {at}: {error}")
            unread.append(error)
    if whole and unread:
        raise unread[0]
    return whole


def _verify_one(run_dir: str | Path, at: int, log: Callable[[str], None]) -> bool:
    """Verify a checkpoint. Returns:  whether it is intact. Raises:   Unreadable."""
    found = damage(run_dir, at)
    known = {} if found else read_saved(run_dir, at).fingerprints
    found += _array_damage(folder(run_dir) / str(at), known, log)
    if found and not (folder(run_dir) / str(at)).is_dir():
        raise integrity.Unreadable(f"step {at} of {run_dir} went away while it was read")
    for text in found:
        log(f"step {at}: {text}")
    for name in integrity.extra_files(folder(run_dir) / str(at)):
        log(f"step {at}: note: {name} does not belong to this checkpoint, and is ignored")
    log(f"step {at}: {DAMAGED if found else 'intact'}")
    return not found


def require_whole(run_dir: str | Path, step: int) -> int:
    """Read and verify every byte of a checkpoint, and return its step.

    Raises:   Damaged; Unreadable; ConfigError when there is no such checkpoint.
    """
    found = damage(run_dir, step)
    known = {} if found else read_saved(run_dir, step).fingerprints
    found += _array_damage(folder(run_dir) / str(step), known, lambda _: None)
    if found:
        raise integrity.Damaged(f"the checkpoint of step {step} of {run_dir}", found)
    return step


def _array_damage(step_folder: Path, known: dict[str, str], log: Callable[[str], None]) -> list:
    """Return what is wrong with the arrays. Reads all; without `known`, compares none."""
    found, arrays = [], {}
    try:
        names = store.array_names(step_folder)
    except Exception as error:  # a damaged file can raise any error
        return [f"its arrays cannot be listed ({reason(step_folder, error)})"]
    found += [f"{name} is missing" for name in known if name not in names]
    for name in names:
        try:
            arrays[name] = store.open_array(step_folder, name)
        except Exception as error:
            found.append(f"{name} cannot be opened ({reason(step_folder, error)})")
    with meter(sum(map(store.num_bytes, arrays.values()))) as progress:
        for name, array in arrays.items():
            try:
                sums = store.fingerprint_of(array)
            except Exception as error:
                found.append(f"{name} cannot be read ({reason(step_folder, error)})")
                continue
            found += integrity.describe_differences(known, {name: sums}) if known else []
            progress.advance(store.num_bytes(array))
        largest = max(map(store.num_bytes, arrays.values()), default=0)
        log(f"{step_folder}: read {progress.summary(largest)}")
    return found


def _steps(run_dir: str | Path, step: int | None) -> list[int]:
    """Return the steps to inspect.

    Raises:   ConfigError when there is none, or not this one.
    """
    steps = saved_steps(run_dir)
    if not steps:
        raise ConfigError("RUN", str(run_dir), "contains no checkpoint", "use the folder of a run")
    if step is None:
        return steps
    if step not in steps:
        held = ", ".join(map(str, steps))
        raise ConfigError("--step", step, f"is not a checkpoint of {run_dir}", f"use one of {held}")
    return [step]
