"""Completes a checkpoint of an earlier attempt whose shards are still on the hosts' disks.

An attempt that was killed may have saved a step in all processes, but not uploaded it. The hosts
of the next attempt upload it before they start, also if their ranks are others, as long as every
shard is on one of them.
"""

import re
from pathlib import Path
from typing import NamedTuple

from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.peers import log
from jaxpar.stores import steps
from jaxpar.stores.lease import Lease
from jaxpar.stores.objects import Altered, Objects
from jaxpar.stores.sessions import last_session, sessions_of
from jaxpar.stores.shards import ProcessShards, ShardLayout, complete, save_name

_FOLDER = re.compile("([0-9]{1,9})-of-([0-9]{1,9})")


class SavedShards(NamedTuple):
    """Shards of one process of an earlier attempt, in a folder of a host."""

    step: int
    num_processes: int
    identity: str
    rank: int


def folder_name(rank: int, count: int) -> str:
    """Return the name of the folder of shards of one of the processes, in that of the run."""
    return f"{steps.SHARDS}/{rank}-of-{count}"


def finish(
    objects: Objects,
    folder: Path | None,
    lease: Lease | None,
    layout: ShardLayout,
    mark: str,
    seconds: float,
) -> None:
    """Upload and complete the newest step of the last attempt, if it is newer than the store's.

    All processes call this together.

    Args:     folder: of the run, in the first process of those that share it; None in the others.
              lease: in process 0. mark: the file that a step has once it is saved. seconds: to wait
              for other processes.
    Raises:   StoreError; OSError; in the other processes, PeerFailed.
    """

    def known() -> str:
        if lease is None:
            return ""
        newest = max(steps.complete_steps(objects), default=-1)
        return f"{lease.session} {newest} {last_session(objects)}"

    own = peers.all_or_none("newest step of the store", seconds, known)
    told = peers.exchange("session that finishes", own, seconds)[0].split()
    session, newest, before = told[0], int(told[1]), told[2]
    mine = _saved(folder, layout, mark) if folder and before in sessions_of(folder) else []
    lines = "\n".join(" ".join(map(str, one)) for one in mine if one.step > newest)
    chosen = _chosen(peers.reports("shards of an earlier attempt", lines or None, seconds))
    if not chosen:
        return
    step, count, identity, _ = next(iter(chosen))
    log(f"uploading  step {step} of an earlier attempt, from {len(set(chosen.values()))} hosts")

    def send() -> None:
        for one, process in chosen.items():
            if process == peers.rank() and folder is not None:
                place = folder / folder_name(one.rank, count)
                ProcessShards(objects, place, (one.rank, count), session, layout).send(step)

    peers.all_or_none("shards of an earlier attempt are sent", seconds, send)

    def join() -> None:
        if lease is None or folder is None:
            return
        save = save_name(session, count, identity, step)
        try:
            complete(objects, layout, save, step, count, folder / ".joining", lease.check)
        except Altered as error:
            warn(f"step {step} of an earlier attempt cannot be completed: {error}")
            steps.delete_step(objects, step)

    peers.all_or_none("earlier attempt is complete", seconds, join)


def _saved(folder: Path, layout: ShardLayout, mark: str) -> list[SavedShards]:
    """Return the shards in the folder of a run."""
    found = []
    for place in sorted((folder / steps.SHARDS).glob("*")):
        if (name := _FOLDER.fullmatch(place.name)) is None:
            continue
        for step in steps.finished_steps(place, mark):
            try:
                identity = layout.identity(place / steps.STEPS / str(step))
            except (OSError, ValueError):  # damaged: it is not uploaded
                continue
            found.append(SavedShards(step, int(name[2]), identity, int(name[1])))
    return found


def _chosen(texts: dict[int, str]) -> dict[SavedShards, int]:
    """Return the shards of the newest step of which all are there, each with a process that has it.

    Args:     texts: the lines of `finish`, by process.
    """
    saves: dict[tuple[int, int, str], dict[int, int]] = {}
    for process, text in sorted(texts.items(), reverse=True):
        for of_step, of, name, rank in map(str.split, text.splitlines()):
            saves.setdefault((int(of_step), int(of), name), {})[int(rank)] = process
    whole = [save for save, ranks in saves.items() if set(ranks) == set(range(save[1]))]
    if not whole:
        return {}
    step, count, identity = max(whole)
    ranks = saves[step, count, identity]
    return {SavedShards(step, count, identity, rank): ranks[rank] for rank in range(count)}
