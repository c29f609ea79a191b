"""Hosts for tests in one process: folders and servers, and devices that count as theirs."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxpar.checkpoint.saving import metadata_of_run
from jaxpar.config import Config, declared
from jaxpar.data.skips import SkippedBatches
from jaxpar.memory_checkpoint.client import LIMITS_FILE, Limits, PieceClient
from jaxpar.memory_checkpoint.places import (
    MIRRORED,
    OWN,
    Group,
    MemoryPlace,
    complete_files,
    read_name,
)
from jaxpar.memory_checkpoint.plan import ProcessPieces, pieces_of
from jaxpar.memory_checkpoint.server import PieceServer
from jaxpar.memory_checkpoint.slots import Slot
from jaxpar.memory_checkpoint.writing import metadata_of
from jaxpar.runtime.processes.token import RunToken
from jaxpar.step.state import TrainState, snapshot

TOKEN = RunToken("the token of all tests")


def accept(folder: Path, session: str, size: int = 1 << 60, steps: int = 10**9) -> None:
    """Let a host take files of a session from others."""
    limits = Limits(session=session, last_step=steps, file_bytes=size, all_bytes=2 * size)
    (folder / LIMITS_FILE).write_text(declared.to_json(limits))


class FakeHosts:
    """So many hosts, each with a folder and a server."""

    def __init__(self, folders: Sequence[Path], peers: Sequence[str]):
        self.folders, self.peers, self.count = list(folders), tuple(peers), len(peers)

    def first(self, count: int) -> "FakeHosts":
        """Some of the hosts."""
        return FakeHosts(self.folders[:count], self.peers[:count])

    def place(self, host: int) -> MemoryPlace:
        return MemoryPlace(self.folders[host], self.peers, host, TOKEN)

    def copy(
        self,
        cfg: Config,
        state: TrainState,
        group: Group,
        copies: int = 1,
        processes: int = 0,
        skipped: SkippedBatches = SkippedBatches(),  # noqa: B008, a constant
    ) -> list[ProcessPieces]:
        """Write a copy of a state, whose devices belong to processes, and these to hosts, in order.

        Args:     processes: how many; 0: one for each host.
        """
        tree, processes = snapshot(state, cfg).saved, processes or self.count
        about = metadata_of_run(cfg, skipped, {}) | metadata_of(tree, 100)
        devices = sorted(jax.tree.leaves(tree)[0].sharding.device_set, key=lambda one: one.id)
        process_of = lambda device: devices.index(device) * processes // len(devices)  # noqa: E731
        for folder in self.folders:
            accept(folder, group.session)
        hosts = [process * self.count // processes for process in range(processes)]
        found = []
        for process, host in enumerate(hosts):
            pieces = pieces_of(tree, hosts, process, copies, process_of)
            slot = Slot(self.folders[host], pieces, process, group.number)
            with ThreadPoolExecutor(1) as thread:
                slot.begin(thread)
            slot.copy(tree)
            paths = slot.complete(group, json.loads(json.dumps(about)))
            slot.close()
            for ahead in range(1, copies + 1):
                for path in paths:
                    file = read_name(path.name)
                    if file is not None and not file.shared:
                        with PieceClient(self.peers[(host + ahead) % self.count], TOKEN) as client:
                            client.write(path)
            found.append(pieces)
        return found

    def lose(self, host: int) -> None:
        """Delete all files of a host."""
        for paths in complete_files(self.folders[host]).values():
            for path in paths:
                path.unlink()

    def files(self, host: int, kind: str = OWN) -> list[Path]:
        return sorted((self.folders[host] / kind).iterdir())


def folders_of(folder: Path, count: int) -> list[Path]:
    """Folders of hosts, made if they are not there."""
    folders = [folder / f"host{number}" for number in range(count)]
    for one in folders:
        for kind in (OWN, MIRRORED):
            (one / kind).mkdir(parents=True, exist_ok=True)
    return folders


@contextlib.contextmanager
def fake_hosts(folder: Path, count: int) -> Iterator[FakeHosts]:
    with contextlib.ExitStack() as stack:
        folders = folders_of(folder, count)
        servers = [stack.enter_context(PieceServer(one, "127.0.0.1", TOKEN)) for one in folders]
        yield FakeHosts(folders, [f"127.0.0.1:{server.port}" for server in servers])


def numbers(tree: Any) -> int:
    """How many numbers a tree has."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
