"""Copies of the state in the memory of hosts: where this host's are, and who serves them.

The copies are made and read by the package `memory_checkpoint`; the program that starts a launcher
passes in its folder and its server.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from jaxpar.runtime.processes.hosts.generations import Generation, Host
from jaxpar.runtime.processes.launcher import CopiesInMemory
from jaxpar.runtime.processes.token import RunToken


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
    """The copies on this host."""

    def __init__(self, memory: CopiesInMemory, server: ServesPieces, token: RunToken):
        self.memory, self._server, self._token = memory, server, token

    @property
    def port(self) -> int:
        """The port of the server of pieces."""
        return self._server.port

    def newest_step(self) -> int:
        """Return the step of the latest copy of which this host has a piece; -1 without any."""
        return self.memory.newest_step()

    def variables(self, generation: Generation, own: Host) -> dict[str, str]:
        """Return the variables of this host's processes in a generation."""
        self._server.ensure()
        index = generation.members.index(own.name)
        return self.memory.environment(generation.pieces, index) | self._token.environment()
