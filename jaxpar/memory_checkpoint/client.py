"""Asks the piece server of a host: for the names of its files, for bytes, and to take a file."""

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config import declared
from jaxpar.config.printable import printable
from jaxpar.memory_checkpoint import messages
from jaxpar.memory_checkpoint.messages import MAX_ANSWER, MAX_PROOF, Answer, Greeting, PieceRequest
from jaxpar.runtime.processes.token import RunToken

#: Seconds to connect, and without any progress, after which a host counts as lost.
CONNECT_SECONDS, STALLED_SECONDS = 10.0, 60.0

#: Bytes that are sent by one call.
PIECE = 16 << 20


class HostLost(OSError):
    """The server of a host does not answer, or not as it should."""


class PieceClient:
    """A connection to the server of a host. Threads may share it.

    A request is a line of JSON, and so is the answer (`messages.py`). Bytes of a file follow the
    answer to "read", and the request "write" once it is granted.
    """

    def __init__(self, address: str, token: RunToken):
        """
        Args:     address: host:port. token: of the run.
        Raises:   HostLost; also if the server does not have the token.
        """
        self.address, self._lock = address, threading.RLock()
        host, _, port = address.rpartition(":")
        try:
            to = (host.strip("[]"), int(port))
            self._socket = socket.create_connection(to, CONNECT_SECONDS)
            self._socket.settimeout(STALLED_SECONDS)
            self._file = self._socket.makefile("rb")
        except (OSError, ValueError) as error:
            raise HostLost(f"{address}: {error}") from error
        try:
            self._prove(token)
        except HostLost:
            self.close()
            raise

    def _prove(self, token: RunToken) -> None:
        """Show the server that this is a peer, and check that it is one. Raises:   HostLost."""
        with self._or_lost():
            greeting = declared.read(Greeting, self._file.readline(MAX_PROOF))
            shown = messages.proof(token, greeting)
            self._socket.sendall(messages.line(shown))
            expected = messages.server_signature(token, greeting.nonce, shown)
        answer = self._answer(MAX_PROOF)
        if not hmac.compare_digest(answer.signature.encode(), expected.encode()):
            raise HostLost(f"{self.address} {messages.OTHER_TOKEN}")

    def files(self) -> dict[str, int]:
        """Return the bytes of each complete file of the host, by name. Raises:   HostLost."""
        with self._lock:
            return self._ask(PieceRequest(do="list")).files

    def read(self, name: str, begin: int, memory: memoryview) -> None:
        """Read bytes of a file, from `begin` on, as many as fit. Raises:   HostLost."""
        request = PieceRequest(do="read", name=name, begin=begin, size=memory.nbytes)
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
            self._ask(PieceRequest(do="write", name=path.name, size=size))
            with self._or_lost():
                self._socket.sendfile(file)
            self._answer()

    def _ask(self, request: PieceRequest) -> Answer:
        with self._or_lost():
            self._socket.sendall(messages.line(request))
        return self._answer()

    def _answer(self, most: int = MAX_ANSWER) -> Answer:
        with self._or_lost():
            line = self._file.readline(most)
            if not line:
                raise HostLost(f"{self.address}: the connection was closed")
            answer = declared.read(Answer, line, max_bytes=most)
        if answer.error:
            raise HostLost(f"{self.address}: {printable(answer.error)}")
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
