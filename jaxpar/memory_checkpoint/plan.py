"""What each process copies and each host holds, and whether the host has the memory for it.

A process writes every part that its host holds, once a host.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import Config, ConfigError, present
from jaxpar.config.fields import turning_off
from jaxpar.memory_checkpoint.piece_file import ArrayType, PieceIndex, place_pieces
from jaxpar.memory_checkpoint.places import FOLDER, MIRRORED, OWN, MemoryPlace
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import peers
from jaxpar.sharding.fingerprint import named_leaves
from jaxpar.sharding.grid import Box, boxes_of


@dataclass(frozen=True)
class ProcessPieces:
    """The pieces of one process. Parts that too few hosts hold are sent to others."""

    single: PieceIndex
    """Pieces that are sent."""
    shared: PieceIndex
    """Pieces that enough hosts hold as replicas, which are not sent."""
    devices: dict[tuple[int, Box], jax.Device]
    """The device of this process that a piece is copied from, by array and box."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.single.num_bytes + self.shared.num_bytes


def pieces_of(
    tree: Any,
    hosts: Sequence[int],
    process: int,
    copies: int,
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> ProcessPieces:
    """Return the pieces that a process writes.

    The lowest process of a host that holds a part writes it for the host.

    Args:     tree: the logical state, or abstract arrays with shardings. hosts: the host of each
              process. copies: other hosts that are to hold each part. process_of: returns the
              process of a device.
    """
    arrays, source = list[ArrayType](), dict[tuple[int, Box], jax.Device]()
    single, shared = list[tuple[int, Box]](), list[tuple[int, Box]]()
    for number, (name, x) in enumerate(named_leaves(tree).items()):
        arrays.append(ArrayType(name, str(x.dtype), tuple(x.shape)))
        for box, devices in boxes_of(tuple(x.shape), x.sharding, everywhere=True).items():
            processes = {process_of(device) for device in devices}
            here = [one for one in processes if hosts[one] == hosts[process]]
            if not here or min(here) != process:
                continue
            own = (device for device in devices if process_of(device) == process)
            source[number, box] = min(own, key=lambda device: device.id)
            held = len({hosts[one] for one in processes})
            (single if held <= copies else shared).append((number, box))
    index = lambda parts: place_pieces(arrays, parts, size_of)  # noqa: E731
    return ProcessPieces(index(single), index(shared), source)


def size_of(dtype: str) -> int:
    """Return the bytes of an element, also of dtypes that NumPy alone does not know."""
    return int(jax.numpy.dtype(dtype).itemsize)


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
    copies = min(present(cfg.checkpoint.memory).copies, place.num_hosts - 1)
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
    path, every = "checkpoint.memory.every", present(cfg.checkpoint.memory).every
    room, fix = free_bytes(folder) + _bytes_of_copies(folder), f"use {turning_off(path)[0]}"
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
