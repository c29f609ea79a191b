"""Copies of the state in the memory of hosts: where this host's are, and who serves them.

The copies are made and read by the package `memory_checkpoint`; the program that starts a launcher
passes in its folder and its server.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from jaxpar.runtime.processes.hosts.generations import Generation, Host
from jaxpar.runtime.processes.token import RunToken


class CopiesInMemory(Protocol):
    """`memory_checkpoint.places.HostMemory`: copies of the state that outlive the processes."""

    @property
    def folder(self) -> Path:
        """The folder of this host's copies."""

    def environment(self, peers: Sequence[str] = (), host: int = 0) -> dict[str, str]:
        """Return variables for the processes."""

    def newest_step(self) -> int:
        """Return the step of the latest copy; -1 without any."""


class ServesPieces(Protocol):
    """`memory_checkpoint.server.PieceServer`."""

    @property
    def port(self) -> int:
        """The port on which it listens."""

    def ensure(self) -> None:
        """Start its process, again if it has ended."""


#: Makes a server of a folder's files, on an address, for those who have the run's token.
type MakesServer = Callable[[Path, str, RunToken], AbstractContextManager[Any]]


class Copies:
    """The copies on this host. Pieces of the latest one may be missing; the processes find out."""

    def __init__(
        self,
        memory: CopiesInMemory,
        server: ServesPieces | None = None,
        token: RunToken | None = None,
    ):
        """Args:     server, token: for the other hosts; None for a run on one host."""
        self._memory, self._server, self._token = memory, server, token

    def newest_step(self) -> int:
        """Return the step of the latest copy of which this host has a piece; -1 without any."""
        return self._memory.newest_step()

    def variables(self, generation: Generation, own: Host) -> dict[str, str]:
        """Return the variables of this host's processes in a generation."""
        if self._server is None or self._token is None:
            return self._memory.environment()
        self._server.ensure()
        index = generation.members.index(own.name)
        return self._memory.environment(generation.pieces, index) | self._token.environment()
