"""Lists and verifies the checkpoints of a run in an object store, complete or not."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.checkpoint import inspection
from jaxpar.checkpoint.inspection import DAMAGED, CheckpointRow, mesh_in_words
from jaxpar.checkpoint.integrity import Damaged, Unreadable
from jaxpar.checkpoint.saved import METADATA, read_saved
from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import local_folder, read_address
from jaxpar.stores import steps
from jaxpar.stores.objects import Altered, Found, Missing, Objects, StoreError

#: What is said of a checkpoint without its list of files.
INCOMPLETE = "incomplete: its upload goes on, or was killed"


def rows(text: str) -> Iterator[CheckpointRow]:
    """Yield every checkpoint of a run in a store, ascending. Downloads their metadata alone.

    Raises:   ConfigError if the address has none; StoreError.
    """
    objects = Objects(read_address("RUN", text), "RUN", patient=False)
    complete = steps.complete_steps(objects)
    found = _by_step(objects)
    if not {*complete, *found}:
        raise ConfigError("RUN", text, "contains no checkpoint", "use the address of a run")
    for step in sorted({*complete, *found}):
        row = _row(objects, step, found.get(step, {}), step in complete)
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


def _row(objects: Objects, step: int, there: dict[str, Found], complete: bool) -> CheckpointRow:
    date = max((one.modified for one in there.values()), default="")
    size, mesh = sum(one.size for one in there.values()), "?"
    if not complete:
        return CheckpointRow(step, date, size, mesh, INCOMPLETE)
    try:
        files = steps.listed(objects, step)
        if wrong := _damage(files, there):
            return CheckpointRow(step, date, size, mesh, f"{DAMAGED}: {wrong}")
        with tempfile.TemporaryDirectory() as place:
            name = f"{steps.STEPS}/{step}/{METADATA}"
            objects.download(name, Path(place, name), files[METADATA])
            saved = read_saved(place, step)
    except (Altered, Missing, Damaged) as error:
        return CheckpointRow(step, date, size, mesh, f"{DAMAGED}: {error}")
    check = f"{len(files)} files of their sizes, {len(saved.fingerprints)} arrays with fingerprints"
    return CheckpointRow(step, date, size, mesh_in_words(saved.config["parallel"]), check)


def _damage(files: dict[str, steps.Content], there: dict[str, Found]) -> str:
    """Describe the first file that is missing or has another size; empty for none."""
    for name, content in files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].size != content.bytes:
            return f"{name} has {there[name].size:,} bytes, not {content.bytes:,}"
    return f"its list of files has no {METADATA}" if METADATA not in files else ""


def verify(text: str, step: int | None, log: Callable[[str], None]) -> bool:
    """Download and verify every byte of the complete checkpoints of a run, one after another.

    Args, Returns:  as `inspection.verify`.
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
            whole &= inspection.verify(folder, at, log)
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
