"""Downloads a run from a store: to continue it on this host, or to read it.

A folder that another session has written since is outdated: then the store's files replace it, and
checkpoints that only the folder has are moved to RUN/superseded.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.rules.paths import is_address, is_prefix, local_folder, read_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.run_lock import RunLock
from jaxpar.runtime.messages import warn
from jaxpar.runtime.units import size
from jaxpar.stores import steps
from jaxpar.stores.files import download_files
from jaxpar.stores.objects import Altered, Missing, Objects, OddName
from jaxpar.stores.parts import GROWING, joined, length, ranges
from jaxpar.stores.sessions import NAME as SESSION
from jaxpar.stores.sessions import last_session, note, require_same_run, sessions_of

#: Folder of a run for checkpoints that another session's have replaced.
SUPERSEDED = "superseded"

#: Seconds that a command waits for another one that downloads the same run.
READERS_SECONDS = 3600.0


class StepsDamaged(RunError):
    """All complete checkpoints of a store are damaged."""


def fetch(
    objects: Objects,
    folder: Path,
    mark: str,
    log: Callable[[str], None],
    step: int | None = None,
    reading: bool = False,
    checkpoints: bool = True,
) -> None:
    """Bring a run's folder up to date with the store: files, growing files, and one checkpoint.

    Args:     mark: the file of a checkpoint that differs between any two. step: the checkpoint to
              download. None: the newest that is intact, unless the folder has a newer one that the
              store's last session wrote. reading: the folder is only a copy of the store.
              checkpoints: whether to look at them.
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
        _supersede(objects, folder, complete, mark, reading)
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


def _supersede(
    objects: Objects, folder: Path, complete: list[int], mark: str, reading: bool
) -> None:
    """Move the checkpoints of a folder that are not those of the store to RUN/superseded."""
    for place in sorted((folder / steps.STEPS).glob("*")):
        if (step := steps.step_of(place.name)) is None:
            continue
        try:
            same = step in complete and steps.is_same(objects, folder, step, (mark,))
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


def for_reading(
    field: str,
    text: str,
    log: Callable[[str], None],
    step: int | None = None,
    checkpoints: bool = True,
) -> Path:
    """Return a folder of this host with a copy of a run, to read it. Takes no lease.

    It has the run's files and a checkpoint. Later calls download what has changed.

    Args:     field: the argument with the address. step: the checkpoint. None: the newest intact
              one. checkpoints: whether to download any.
    Raises:   ConfigError for an address without a run; as `fetch`.
    """
    address, folder = read_address(field, text), local_folder(read_address(field, text), "read")
    objects = Objects(address, field, patient=checkpoints)
    if not last_session(objects):
        raise _no_run(field, text)
    with RunLock(folder, READERS_SECONDS, log):  # another command may be downloading it
        fetch(objects, folder, steps.MARK, log, step, reading=True, checkpoints=checkpoints)
    return folder


def runs_at(field: str, text: str, depth: int) -> list[str]:
    """Return the addresses of the runs at and below an address, in order.

    Args:     depth: of the prefixes that are looked into.
    Raises:   ConfigError for an address that cannot be used; StoreError.
    """
    address = read_address(field, text)
    objects = Objects(address, field, patient=False)

    def below(folder: str, depth: int) -> list[str]:
        try:
            folders, names = objects.level(folder)
        except OddName as error:
            if not folder:
                raise
            warn(f"{address}/{folder} is left out: it {error.rule}")
            return []
        if {f"{folder}config.json", f"{folder}{SESSION}"} <= set(names):
            return [f"{address}/{folder}".rstrip("/")]
        if not depth:
            return []
        return [run for one in folders if is_prefix(one) for run in below(f"{one}/", depth - 1)]

    return below("", depth)


def with_local_config(arguments: ConfigArguments) -> ConfigArguments:
    """Replace an address as CONFIG by a folder of this host with the config of its run.

    Raises:   ConfigError for an address without a run; StoreError.
    """
    if not is_address(arguments.name):
        return arguments
    address = read_address("CONFIG", arguments.name)
    objects, folder = Objects(address, "CONFIG", patient=False), local_folder(address, "runs")
    last = last_session(objects)
    if not last:
        raise _no_run("CONFIG", arguments.name)
    if last not in sessions_of(folder):
        for name in ("config.json", "manifest.json"):
            with contextlib.suppress(Missing):
                objects.download(name, folder / name)
    return dataclasses.replace(arguments, name=str(folder))


def _no_run(field: str, text: str) -> ConfigError:
    return ConfigError(field, text, "contains no run", "use the run.dir or run.store of a run")
