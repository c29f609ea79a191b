"""Where copies of the state are: a folder in the memory of each host, and the names of its files.

Imports no JAX: the launcher starts without it.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxpar.config import Config, ConfigError
from jaxpar.config.fields import turning_off
from jaxpar.memory_checkpoint.client import PieceClient
from jaxpar.runtime.files.lock import locked
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken, given_token

if TYPE_CHECKING:
    from jaxpar.memory_checkpoint.server import PieceServer

#: Variables that a launcher sets for the processes of a run. For the launcher itself, FOLDER is
#: where it makes the folder, in place of SHARED_MEMORY.
FOLDER, PEERS, HOST = "JAXPAR_MEMORY_FOLDER", "JAXPAR_MEMORY_PEERS", "JAXPAR_MEMORY_HOST"

#: The file system in memory that every Linux host has.
SHARED_MEMORY = "/dev/shm"

#: Folders of a host: files of its own processes, and copies of other hosts' files.
OWN, MIRRORED = "own", "mirrored"

#: Begins the name of a file that is not complete.
PARTIAL = "."

_PREFIX, _LOCK = "jaxpar-memory-", "lock"
_NAME = re.compile(r"step_(\d{10})\.([0-9a-f]{8})\.(\d{1,9})\.(\d{1,9})\.(single|shared)")


class Group(NamedTuple):
    """Identifies one copy of the state, whose pieces are in many files."""

    step: int
    session: str
    """Of the processes that wrote it: eight hexadecimal digits, new at each start."""
    number: int
    """Of the copy in its session, from 0."""


class PieceFile(NamedTuple):
    """The name of a file: which pieces of which copy it holds."""

    group: Group
    process: int
    """The process that wrote it."""
    shared: bool
    """Its pieces are on enough hosts without being sent: they hold replicas of them."""

    def __str__(self) -> str:
        kind = "shared" if self.shared else "single"
        step, session, number = self.group
        return f"step_{step:010d}.{session}.{number}.{self.process}.{kind}"


def read_name(name: str) -> PieceFile | None:
    """Return what the name of a complete file says; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, session, number, process, kind = match.groups()
    return PieceFile(Group(int(step), session, int(number)), int(process), kind == "shared")


def complete_files(folder: Path) -> dict[PieceFile, list[Path]]:
    """Return the complete files of a host, each with where it is."""
    found: dict[PieceFile, list[Path]] = {}
    for kind in (OWN, MIRRORED):
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((folder / kind).iterdir()):
                if (file := read_name(path.name)) is not None:
                    found.setdefault(file, []).append(path)
    return found


def delete_files(folder: Path, kind: str, keep: Callable[[PieceFile | None], bool]) -> None:
    """Delete files of a host in OWN or MIRRORED. Some may be deleted by others meanwhile.

    Args:     keep: called with what a name says, None for a file that is not complete.
    """
    for path in sorted((folder / kind).iterdir()):
        if not keep(read_name(path.name)):
            path.unlink(missing_ok=True)


class HostMemory:
    """The folder of one host, which a launcher keeps for the processes that it starts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._served: tuple[PieceServer, RunToken] | None = None

    @contextlib.contextmanager
    def serve(self, address: str, token: RunToken) -> Iterator[int]:
        """Serve the files to other hosts. Args, Raises:   as `PieceServer`. Yields the port."""
        from jaxpar.memory_checkpoint.server import PieceServer  # imports this module

        with PieceServer(self.folder, address, token) as server:
            self._served = server, token
            yield server.port

    def variables(self, peers: Sequence[str] = (), host: int = 0) -> dict[str, str]:
        """Return the variables for the processes of this host. Starts its server again if need be.

        Args:     peers: address of each host's `PieceServer`, as host:port, in the order of the
                  hosts; empty for a run on one host, which needs none. host: index of this one.
        """
        found = {FOLDER: str(self.folder), PEERS: ",".join(peers), HOST: str(host)}
        if self._served is None:
            return found
        server, token = self._served
        server.ensure()
        return found | token.environment()

    def newest_step(self) -> int:
        """Return the latest step of which this host has a piece; -1 without any."""
        return max((file.group.step for file in complete_files(self.folder)), default=-1)


@dataclass(frozen=True)
class MemoryPlace:
    """This process's host among the hosts of the run, as its launcher says."""

    folder: Path
    peers: tuple[str, ...]
    """Address of each host's server, host:port; empty if the run is on one host."""
    host: int
    token: RunToken | None = None
    """Of the run, for these servers."""

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return max(len(self.peers), 1)

    def connected(self, address: str) -> PieceClient:
        """Return a new connection to the server of another host. Raises:   HostLost."""
        assert self.token is not None  # checked with the peers
        return PieceClient(address, self.token)


#: The field that errors name.
EVERY = "checkpoint.memory.every"


def place_of(cfg: Config, env: Mapping[str, str] = os.environ) -> MemoryPlace | None:
    """Return the place that the launcher gives this process; None if the run keeps no copies.

    Raises:   ConfigError when the run keeps copies but no launcher has set the variables, or their
              values make no sense.
    """
    if (memory := cfg.checkpoint.memory) is None:
        return None
    if not env.get(FOLDER):
        rule = "needs a launcher, which keeps the copies while processes end and start again"
        fix = f"start the run by python -m jaxpar.launch -n 1 -- ..., or use {_never()}"
        raise ConfigError(EVERY, memory.every, rule, fix)
    peers = tuple(filter(None, env.get(PEERS, "").split(",")))
    host = env.get(HOST, "0")
    if not host.isdecimal() or int(host) >= max(len(peers), 1):
        rule = f"is not the index of one of {max(len(peers), 1)} hosts"
        raise ConfigError(HOST, host, rule, f"let the launcher set it, or use {_never()}")
    folder = Path(env[FOLDER])
    if not folder.is_dir():
        raise ConfigError(FOLDER, str(folder), "is not a folder", "let the launcher set it")
    token = given_token(env)
    if peers and token is None:
        rule = "is needed to read the copies of other hosts"
        raise ConfigError(TOKEN_FILE, "", rule, f"let the launcher set it, or use {_never()}")
    return MemoryPlace(folder, peers, int(host), token)


def _never() -> str:
    return turning_off(EVERY)[0]


@contextlib.contextmanager
def kept_in_memory(cfg: Config, env: Mapping[str, str] = os.environ) -> Iterator[HostMemory | None]:
    """Keep a folder for copies in this host's memory, for a launcher; delete it at the end.

    Folders of launchers that were killed are deleted first. None without `checkpoint.memory`.

    Raises:   ConfigError when the folder cannot be made.
    """
    if (memory := cfg.checkpoint.memory) is None:
        yield None
        return
    above, held = Path(env.get(FOLDER) or SHARED_MEMORY), contextlib.ExitStack()
    try:
        _delete_abandoned(above)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=above))
        held.enter_context(locked(new / _LOCK))
        for kind in (OWN, MIRRORED):
            (new / kind).mkdir()
        folder = new.rename(above / new.name[1:])  # seen by other launchers once it is locked
    except OSError as error:
        rule = f"needs a folder in {above}, which cannot be made: {error.strerror}"
        fix = f"set {FOLDER} to a folder on a file system in memory, or use {_never()}"
        raise ConfigError(EVERY, memory.every, rule, fix) from error
    with held:
        try:
            yield HostMemory(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned(above: Path) -> None:
    """Delete the folders that no launcher holds: memory is not given back by itself."""
    for folder in sorted(above.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), locked(folder / _LOCK, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
