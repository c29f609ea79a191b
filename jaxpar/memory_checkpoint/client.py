"""Asks the piece server of a host: for the names of its files, for bytes, and to take a file."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Seconds to connect, and without any progress, after which a host counts as lost.
CONNECT_SECONDS, STALLED_SECONDS = 10.0, 60.0

#: Longest line of the protocol.
MAX_LINE = 1 << 20

#: Bytes that are sent by one call.
PIECE = 16 << 20


class HostLost(OSError):
    """The server of a host does not answer, or not as it should."""


class PieceClient:
    """A connection to the server of a host. Threads may share it.

    A request is a line of JSON, and so is the answer. Bytes of a file follow the answer to "read",
    and the request "write" once it is granted.
    """

    def __init__(self, address: str):
        """Args:     address: host:port. Raises:   HostLost."""
        self.address, self._lock = address, threading.RLock()
        host, _, port = address.rpartition(":")
        try:
            to = (host.strip("[]"), int(port))
            self._socket = socket.create_connection(to, CONNECT_SECONDS)
            self._socket.settimeout(STALLED_SECONDS)
            self._file = self._socket.makefile("rb")
        except (OSError, ValueError) as error:
            raise HostLost(f"{address}: {error}") from error

    def files(self) -> dict[str, int]:
        """Return the bytes of each complete file of the host, by name. Raises:   HostLost."""
        with self._lock:
            return dict(self._ask({"do": "list"})["files"])

    def read(self, name: str, begin: int, memory: memoryview) -> None:
        """Read bytes of a file, from `begin` on, as many as fit. Raises:   HostLost."""
        request = {"do": "read", "name": name, "begin": begin, "size": memory.nbytes}
        with self._lock, self._or_lost():
            self._ask(request)
            done = 0
            while done < memory.nbytes:
                got = self._file.readinto(memory[done:])
                if not got:
                    raise HostLost(f"{self.address} closed the connection")
                done += got

    def write(self, path: Path) -> None:
        """Send a file, under its name. Raises:   HostLost; also if the host has no room for it."""
        with self._lock, open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._ask({"do": "write", "name": path.name, "size": size})
            with self._or_lost():
                self._socket.sendfile(file)
            self._answer()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._or_lost():
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        with self._or_lost():
            line = self._file.readline(MAX_LINE)
            answer = json.loads(line) if line else {"error": "the connection was closed"}
        if "error" in answer:
            raise HostLost(f"{self.address}: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except HostLost:
            raise
        except (OSError, ValueError) as error:
            self.close()  # what comes next on it is not known
            raise HostLost(f"{self.address}: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> "PieceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
