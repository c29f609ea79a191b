"""Brings a complete checkpoint of a store to the folders of all hosts, or to none."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar.runtime.processes import peers
from jaxpar.runtime.units import size
from jaxpar.stores import steps
from jaxpar.stores.fetching import StepsDamaged, set_aside
from jaxpar.stores.objects import Altered, Missing, Objects


def bring(
    objects: Objects,
    folder: Path | None,
    mark: str,
    damaged: Callable[[Path, int], list[str]],
    log: Callable[[str], None],
    name: str,
    seconds: float,
) -> int | None:
    """Bring the newest intact checkpoint to each folder; any others there are moved away.

    All processes call this together.

    Args:     folder: of the run, in the first process of those that share it; None in the others.
              mark: the file of a checkpoint that differs between any two. damaged: describes what
              is wrong with a step of a folder. log: called in process 0. name: of this call, which
              no other one has. seconds: to wait for other processes.
    Returns:  its step, the same in all processes; None if there is none.
    Raises:   StepsDamaged if there are some, but none that all can download; PeerFailed;
              StoreError.
    """
    listed = lambda: steps.complete_steps(objects) if peers.rank() == 0 else []  # noqa: E731
    own = peers.all_or_none(f"{name}: list", seconds, listed)
    said = peers.exchange(f"{name}: steps", " ".join(map(str, own)), seconds)[0]
    found: dict[int, str] = {}

    def move_others(kept: int | None) -> None:
        move = lambda: _move_others(objects, folder, kept, mark)  # noqa: E731
        peers.all_or_none(f"{name}: others", seconds, move)

    for step in reversed([int(one) for one in said.split()]):
        try_it = lambda step=step: _brought(objects, folder, step, mark, damaged, log)  # noqa: E731
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
    mark: str,
    damaged: Callable[[Path, int], list[str]],
    log: Callable[[str], None],
) -> str:
    """Bring a step to a folder, unless it is there. Returns:  its damage in the store."""
    if folder is None:
        return ""
    place = folder / steps.STEPS / str(step)
    try:
        if place.exists():
            if steps.is_same(objects, folder, step, (mark,)) and not damaged(folder, step):
                return ""
            set_aside(objects, folder, place)
        log(f"download   step {step} of {objects.address}")
        log(f"download   step {step}, {size(steps.download_step(objects, folder, step))}, verified")
    except Missing:
        return "it was deleted meanwhile"
    except Altered as error:
        return str(error)
    return ""


def _move_others(objects: Objects, folder: Path | None, kept: int | None, mark: str) -> None:
    """Delete the other checkpoints of a folder that are in the store, and set aside the rest."""
    if folder is None:
        return
    for place in sorted((folder / steps.STEPS).glob("*")):
        if (step := steps.step_of(place.name)) is None or step == kept:
            continue
        with contextlib.suppress(Missing, Altered):
            if steps.is_same(objects, folder, step, (mark,)):
                shutil.rmtree(place)
                continue
        set_aside(objects, folder, place)
