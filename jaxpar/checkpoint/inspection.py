"""Lists and verifies checkpoints: those in the folder of a run, or in an object store."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import integrity, stored_arrays
from jaxpar.checkpoint.best import Best, of
from jaxpar.checkpoint.integrity import Damaged, Unreadable
from jaxpar.checkpoint.saved import METADATA, checkpoint_folder, damage, read_saved, saved_steps
from jaxpar.checkpoint.stored_arrays import reason
from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import local_folder, read_address
from jaxpar.runtime import tables
from jaxpar.runtime.progress import meter
from jaxpar.runtime.units import size
from jaxpar.sharding.axes import AXES
from jaxpar.stores import steps
from jaxpar.stores.objects import Altered, Found, Missing, Objects, StoreError

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
    at = checkpoint_folder(run_dir) / str(step)
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
    at = checkpoint_folder(run_dir) / str(step)
    files = [file.stat() for file in sorted(_paths(at)) if file.is_file()]
    date = datetime.fromtimestamp(at.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    found, mesh = damage(run_dir, step), "?"
    if found:
        check = f"{DAMAGED}: {found[0]}"
    else:
        saved = read_saved(run_dir, step)
        mesh, check = mesh_in_words(saved.config["parallel"]), "no file list"
        check = "files verified" if integrity.has_file_list(at) else check
        check += f", {len(saved.fingerprints)} arrays with fingerprints"
    return CheckpointRow(step, date, sum(file.st_size for file in files), mesh, check)


def _paths(place: Path) -> set[Path]:
    """Return all paths below a folder, except those deleted meanwhile."""
    return {Path(at, name) for at, *names in os.walk(place) for name in itertools.chain(*names)}


def mesh_in_words(parallel: dict[str, Any]) -> str:
    """Describe the mesh that wrote a checkpoint, as `mesh.describe` does."""
    named = [f"{axis}={parallel.get(axis, 1)}" for axis in AXES if parallel.get(axis, 1) != 1]
    return " ".join(named) or "1 device"


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
    found = _all_damage(run_dir, at, log)
    if found and not (checkpoint_folder(run_dir) / str(at)).is_dir():
        raise integrity.Unreadable(f"step {at} of {run_dir} went away while it was read")
    for text in found:
        log(f"step {at}: {text}")
    for name in integrity.extra_files(checkpoint_folder(run_dir) / str(at)):
        log(f"step {at}: note: {name} does not belong to this checkpoint, and is ignored")
    log(f"step {at}: {DAMAGED if found else 'intact'}")
    return not found


def require_whole(run_dir: str | Path, step: int) -> int:
    """Read and verify every byte of a checkpoint, and return its step.

    Raises:   Damaged; Unreadable; ConfigError when there is no such checkpoint.
    """
    if found := _all_damage(run_dir, step, lambda _: None):
        raise integrity.Damaged(f"the checkpoint of step {step} of {run_dir}", found)
    return step


def _all_damage(run_dir: str | Path, step: int, log: Callable[[str], None]) -> list[str]:
    """Return what is wrong with a checkpoint. Raises:   as `require_whole`, but for Damaged."""
    found = damage(run_dir, step)
    known = {} if found else read_saved(run_dir, step).fingerprints
    return found + _array_damage(checkpoint_folder(run_dir) / str(step), known, log)


def _array_damage(step_folder: Path, known: dict[str, str], log: Callable[[str], None]) -> list:
    """Return what is wrong with the arrays. Reads all; without `known`, compares none."""
    found, arrays = [], {}
    try:
        names = stored_arrays.array_names(step_folder)
    except Exception as error:  # a damaged file can raise any error
        return [f"its arrays cannot be listed ({reason(step_folder, error)})"]
    found += [f"{name} is missing" for name in known if name not in names]
    for name in names:
        try:
            arrays[name] = stored_arrays.open_array(step_folder, name)
        except Exception as error:
            found.append(f"{name} cannot be opened ({reason(step_folder, error)})")
    with meter(sum(map(stored_arrays.num_bytes, arrays.values()))) as progress:
        for name, array in arrays.items():
            try:
                sums = stored_arrays.fingerprint_of(array)
            except Exception as error:
                found.append(f"{name} cannot be read ({reason(step_folder, error)})")
                continue
            found += integrity.describe_differences(known, {name: sums}) if known else []
            progress.advance(stored_arrays.num_bytes(array))
        largest = max(map(stored_arrays.num_bytes, arrays.values()), default=0)
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


#: What is said of a checkpoint without its list of files.
INCOMPLETE = "incomplete: its upload goes on, or was killed"


def rows_in_store(text: str) -> Iterator[CheckpointRow]:
    """Yield every checkpoint of a run in a store, ascending. Downloads their metadata alone.

    Raises:   ConfigError if the address has none; StoreError.
    """
    objects = Objects(read_address("RUN", text), "RUN", patient=False)
    complete = steps.complete_steps(objects)
    found = _by_step(objects)
    if not {*complete, *found}:
        raise ConfigError("RUN", text, "contains no checkpoint", "use the address of a run")
    for step in sorted({*complete, *found}):
        row = _row_in_store(objects, step, found.get(step, {}), step in complete)
        if row.check != INCOMPLETE and not row.check.startswith(DAMAGED):
            yield row
        elif step in steps.complete_steps(objects) or step not in complete:
            yield row  # otherwise it was deleted meanwhile


def _by_step(objects: Objects) -> dict[int, dict[str, Found]]:
    """Return the objects of each step, by their names below it."""
    found: dict[int, dict[str, Found]] = {}
    for one in objects.names(f"{steps.STEPS}/"):
        number, _, name = one.name.removeprefix(f"{steps.STEPS}/").partition("/")
        if name and (step := steps.step_of(number)) is not None:
            found.setdefault(step, {})[name] = one
    return found


def _row_in_store(
    objects: Objects, step: int, there: dict[str, Found], complete: bool
) -> CheckpointRow:
    date = max((one.modified for one in there.values()), default="")
    size, mesh = sum(one.size for one in there.values()), "?"
    if not complete:
        return CheckpointRow(step, date, size, mesh, INCOMPLETE)
    try:
        files = steps.listed(objects, step)
        if wrong := _object_damage(files, there):
            return CheckpointRow(step, date, size, mesh, f"{DAMAGED}: {wrong}")
        with tempfile.TemporaryDirectory() as place:
            name = f"{steps.STEPS}/{step}/{METADATA}"
            objects.download(name, Path(place, name), files[METADATA])
            saved = read_saved(place, step)
    except (Altered, Missing, Damaged) as error:
        return CheckpointRow(step, date, size, mesh, f"{DAMAGED}: {error}")
    check = f"{len(files)} files of their sizes, {len(saved.fingerprints)} arrays with fingerprints"
    return CheckpointRow(step, date, size, mesh_in_words(saved.config["parallel"]), check)


def _object_damage(files: dict[str, steps.Content], there: dict[str, Found]) -> str:
    """Describe the first file that is missing or has another size; empty for none."""
    for name, content in files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].size != content.bytes:
            return f"{name} has {there[name].size:,} bytes, not {content.bytes:,}"
    return f"its list of files has no {METADATA}" if METADATA not in files else ""


def verify_in_store(text: str, step: int | None, log: Callable[[str], None]) -> bool:
    """Download and verify every byte of the complete checkpoints of a run, one after another.

    Args, Returns:  as `verify`.
    Raises:   ConfigError if there is no such checkpoint; Unreadable; StoreError.
    """
    address = read_address("RUN", text)
    objects, folder = Objects(address, "RUN"), local_folder(address, "verify")
    complete = steps.complete_steps(objects)
    if not complete:
        raise ConfigError("RUN", text, "contains no checkpoint", "use the address of a run")
    if step is not None and step not in complete:
        held = ", ".join(map(str, complete))
        raise ConfigError("--step", step, f"is no checkpoint of {text}", f"use one of {held}")
    whole = True
    for at in complete if step is None else [step]:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            steps.download_step(objects, folder, at)
            whole &= verify(folder, at, log)
        except Missing:
            log(f"step {at}: deleted meanwhile")
        except Altered as error:
            whole = False
            log(f"step {at}: {error}")
            log(f"step {at}: {DAMAGED}")
        except StoreError as error:
            raise Unreadable(f"step {at} cannot be read: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return whole
