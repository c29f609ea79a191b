"""Downloads a run from a store: to continue it on this host, or on several that share no folder.

A folder that another session has written since is outdated: then the store's files replace it, and
checkpoints that only the folder has are moved to RUN/superseded.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.runtime.units import size
from jaxpar.stores import steps
from jaxpar.stores.files import (
    GROWING,
    download_files,
    joined,
    last_session,
    length,
    note,
    ranges,
    require_same_run,
    sessions_of,
)
from jaxpar.stores.objects import Altered, Missing, Objects

#: Folder of a run for checkpoints that another session's have replaced.
SUPERSEDED = "superseded"


class StepsDamaged(RunError):
    """All complete checkpoints of a store are damaged."""


def fetch(
    objects: Objects,
    folder: Path,
    log: Callable[[str], None],
    step: int | None = None,
    reading: bool = False,
    checkpoints: bool = True,
) -> None:
    """Bring a run's folder up to date with the store: files, growing files, and one checkpoint.

    Args:     step: the checkpoint to download. None: the newest that is intact, unless the folder
              has a newer one that the store's last session wrote. reading: the folder is
              only a copy of the store. checkpoints: whether to look at them.
    Raises:   StepsDamaged; ConfigError if there is no such step; StoreError.
    """
    last = last_session(objects)
    if not last:
        return
    ours = not reading and last in sessions_of(folder)
    if not ours and not reading:
        require_same_run(objects, folder)
        note(folder, "downloaded", objects.address)
    download_files(objects, folder, objects.names(), again=not ours)
    for name in GROWING:
        _fetch_growing(objects, folder, name, ours, reading)
    if not checkpoints:
        return
    complete = steps.complete_steps(objects)
    if not ours:
        _supersede(objects, folder, complete, reading)
    if step is not None and step not in complete:
        held = ", ".join(map(str, complete)) or "none"
        rule = f"is not a complete checkpoint of {objects.address}"
        raise ConfigError("step", step, rule, f"use one of {held}")
    names = (steps.step_of(place.name) for place in (folder / steps.STEPS).glob("*"))
    here = {found for found in names if found is not None}
    if step is None:
        _fetch_newest(objects, folder, complete, here, log)
    elif step not in here:
        _fetch_newest(objects, folder, [step], set(), log)


def _fetch_growing(objects: Objects, folder: Path, name: str, ours: bool, reading: bool) -> None:
    """Write a growing file as it is in the store, unless the folder has more of it."""
    parts = ranges(objects, name)
    here = (folder / name).stat().st_size if (folder / name).is_file() else 0
    if parts and (not ours or here < length(parts)):
        content, damage = joined(objects, name)
        if damage:
            warn(f"{objects.address}: {damage}. {name} goes on from {len(content):,} bytes")
        before = (folder / name).read_bytes() if here and not reading else b""
        if not content.startswith(before):
            set_aside(objects, folder, folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / name, content)


def _supersede(objects: Objects, folder: Path, complete: list[int], reading: bool) -> None:
    """Move the checkpoints of a folder that are not those of the store to RUN/superseded."""
    for place in sorted((folder / steps.STEPS).glob("*")):
        if (step := steps.step_of(place.name)) is None:
            continue
        try:
            same = step in complete and steps.is_same(objects, folder, step)
        except (Missing, Altered):
            same = False
        if same:
            continue
        if reading:
            shutil.rmtree(place, ignore_errors=True)
            continue
        set_aside(objects, folder, place)


def fetch_files(objects: Objects, folder: Path) -> None:
    """Bring the files of a run to a folder that another host's is uploaded from.

    Files that grow and checkpoints are left out.

    Raises:   ConfigError if the folder has another run; StoreError.
    """
    require_same_run(objects, folder)
    note(folder, "downloaded", objects.address)
    download_files(objects, folder, objects.names(), again=True)


def set_aside(objects: Objects, folder: Path, place: Path) -> None:
    """Move a file or a checkpoint to RUN/superseded, with a warning."""
    aside = folder / SUPERSEDED
    aside.mkdir(exist_ok=True)
    numbers = ("" if number == 0 else f"-{number}" for number in range(10_000))
    names = (aside / f"{place.name}{number}" for number in numbers)
    to = next(name for name in names if not name.exists())
    atomic.move(place, to)
    warn(f"{place} is not that of {objects.address}; it was moved to {to}")


def _fetch_newest(
    objects: Objects,
    folder: Path,
    complete: list[int],
    here: set[int],
    log: Callable[[str], None],
) -> None:
    """Download the last of some steps that is intact, unless it or a later one is here."""
    damage: dict[int, str] = {}
    for step in reversed(complete):
        if max(here, default=-1) >= step:
            return
        log(f"download   step {step} of {objects.address}")
        try:
            num_bytes = steps.download_step(objects, folder, step)
        except Missing:
            continue  # deleted meanwhile
        except Altered as error:
            damage[step] = str(error)
            instead = "" if step == complete[0] else ". An earlier step is used instead"
            warn(f"step {step} of {objects.address} is damaged: {error}{instead}")
            continue
        log(f"download   step {step}, {size(num_bytes)}, verified")
        return
    if damage:
        what = "; ".join(f"step {step}: {text}" for step, text in damage.items())
        raise StepsDamaged(f"every checkpoint of {objects.address} is damaged: {what}")


def bring(
    objects: Objects,
    folder: Path | None,
    damaged: Callable[[Path, int], list[str]],
    log: Callable[[str], None],
    name: str,
    seconds: float,
) -> int | None:
    """Bring the newest intact checkpoint to each folder; any others there are moved away.

    All processes call this together.

    Args:     folder: of the run, in the first process of those that share it; None in the others.
              damaged: describes what is wrong with a step of a folder. log: called in process 0.
              name: of this call, which no other one has. seconds: to wait for other processes.
    Returns:  its step, the same in all processes; None if there is none.
    Raises:   StepsDamaged if there are some, but none that all can download; PeerFailed;
              StoreError.
    """
    listed = lambda: steps.complete_steps(objects) if peers.rank() == 0 else []  # noqa: E731
    own = peers.all_or_none(f"{name}: list", seconds, listed)
    said = peers.exchange(f"{name}: steps", " ".join(map(str, own)), seconds)[0]
    found: dict[int, str] = {}

    def move_others(kept: int | None) -> None:
        move = lambda: _move_others(objects, folder, kept)  # noqa: E731
        peers.all_or_none(f"{name}: others", seconds, move)

    for step in reversed([int(one) for one in said.split()]):
        try_it = lambda step=step: _brought(objects, folder, step, damaged, log)  # noqa: E731
        damage = peers.all_or_none(f"{name}: step {step}", seconds, try_it)
        reports = peers.reports(f"{name}: damage of step {step}", damage or None, seconds)
        if not reports:
            move_others(step)
            return step
        process, found[step] = min(reports.items())
        who = peers.process_name(process)
        log(f"WARNING    step {step} of {objects.address} is damaged, says {who}: {found[step]}")
    move_others(None)
    if found:
        what = "; ".join(f"step {step}: {text}" for step, text in found.items())
        raise StepsDamaged(f"every checkpoint of {objects.address} is damaged: {what}")
    return None


def _brought(
    objects: Objects,
    folder: Path | None,
    step: int,
    damaged: Callable[[Path, int], list[str]],
    log: Callable[[str], None],
) -> str:
    """Bring a step to a folder, unless it is there. Returns:  its damage in the store."""
    if folder is None:
        return ""
    place = folder / steps.STEPS / str(step)
    try:
        if place.exists():
            if steps.is_same(objects, folder, step) and not damaged(folder, step):
                return ""
            set_aside(objects, folder, place)
        log(f"download   step {step} of {objects.address}")
        log(f"download   step {step}, {size(steps.download_step(objects, folder, step))}, verified")
    except Missing:
        return "it was deleted meanwhile"
    except Altered as error:
        return str(error)
    return ""


def _move_others(objects: Objects, folder: Path | None, kept: int | None) -> None:
    """Delete the other checkpoints of a folder that are in the store, and set aside the rest."""
    if folder is None:
        return
    for place in sorted((folder / steps.STEPS).glob("*")):
        if (step := steps.step_of(place.name)) is None or step == kept:
            continue
        with contextlib.suppress(Missing, Altered):
            if steps.is_same(objects, folder, step):
                shutil.rmtree(place)
                continue
        set_aside(objects, folder, place)
