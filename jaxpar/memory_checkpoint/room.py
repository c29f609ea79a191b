"""What each host copies and holds, and whether it has the memory for it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import Config, ConfigError, flag
from jaxpar.memory_checkpoint.layout import ProcessPieces, pieces_of
from jaxpar.memory_checkpoint.places import FOLDER, MIRRORED, OWN, MemoryPlace
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import peers

#: Copies that a host holds at a time: the last complete one, and the one that is written.
AT_A_TIME = 2

#: Bytes of the index of a file, if its pieces are small.
_INDEX = 1 << 20


@dataclass(frozen=True)
class CopyPlan:
    """What this process copies, and its host holds."""

    place: MemoryPlace
    pieces: ProcessPieces
    first_here: bool
    """Whether it is the lowest process of its host."""
    copies: int
    """Other hosts to which pieces are sent, at most."""
    needed: int
    """Bytes that the host needs."""
    received: int = 0
    """Bytes of one copy that the host receives from others."""

    @property
    def receivers(self) -> list[str]:
        """The servers of the hosts to which pieces are sent."""
        ahead = range(1, self.copies + 1)
        place = self.place
        return [place.peers[(place.host + i) % place.num_hosts] for i in ahead]


def plan_copies(cfg: Config, place: MemoryPlace, like: Any, seconds: float) -> CopyPlan:
    """Return what this process copies, after all hosts have checked that they have the memory.

    Args:     like: the logical state, or abstract arrays with shardings. seconds: how long to wait
              for the other processes.
    Raises:   ConfigError when this host's folder is too small; PeerFailed when another's is.
    """
    hosts = list(map(int, peers.exchange("hosts of copies", str(place.host), seconds)))
    copies = min(cfg.checkpoint.memory_copies, place.num_hosts - 1)
    pieces = pieces_of(like, hosts, peers.rank(), copies)
    sizes = f"{pieces.single.num_bytes + _INDEX} {pieces.num_bytes + 2 * _INDEX}"
    said = [list(map(int, s.split())) for s in peers.exchange("bytes of copies", sizes, seconds)]
    senders = {(place.host - back) % place.num_hosts for back in range(1, copies + 1)}
    of_hosts = list(zip(hosts, said, strict=True))
    own = sum(total for host, (_, total) in of_hosts if host == place.host)
    sent = sum(single for host, (single, _) in of_hosts if host in senders)
    needed = AT_A_TIME * (own + sent)
    peers.all_or_none("room for copies", seconds, lambda: check_room(cfg, place.folder, needed))
    first_here = hosts.index(place.host) == peers.rank()
    return CopyPlan(place, pieces, first_here, copies, needed, sent)


def check_room(cfg: Config, folder: Path, needed: int) -> None:
    """Check that a host has the memory. Files of earlier copies count as free.

    Raises:   ConfigError.
    """
    path, every = "checkpoint.memory_every", cfg.checkpoint.memory_every
    room, fix = free_bytes(folder) + _bytes_of_copies(folder), f"use {flag(path, 0)}"
    if needed > room:
        rule = f"needs {needed / 1e9:.3f} GB in {folder}, which has {room / 1e9:.3f} GB: "
        rule += f"{AT_A_TIME} copies of this host's pieces and of those that it holds for others"
        size = -(-needed // (1 << 30)) + 1
        larger = f"make it larger (docker run --shm-size {size}g), set {FOLDER} for the "
        larger += "launcher to a folder on another file system in memory"
        raise ConfigError(path, every, rule, f"{larger}, or {fix}")
    if needed > (memory := host_memory()):
        rule = f"needs {needed / 1e9:.3f} GB of memory on each host, which has {memory / 1e9:.3f}"
        raise ConfigError(path, every, rule, fix)


def free_bytes(folder: Path) -> int:
    """Return the bytes that a file system has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _bytes_of_copies(folder: Path) -> int:
    files = (path for kind in (OWN, MIRRORED) for path in (folder / kind).iterdir())
    return sum(path.stat().st_size for path in files)
