"""Asks the piece server of a host: for the names of its files, for bytes, and to take a file.

Each message is a line of JSON. The server sends a nonce first. The client answers with a nonce of
its own and the signature of both by the run's token, and the server with another signature. A
stranger who listens learns nothing from these. Only then does the server read requests, within the
limits that the run has planned (`Limits`).
"""

import contextlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxpar.config import declared
from jaxpar.config.declared import Count, Name
from jaxpar.config.printable import printable
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken

#: Bytes of the longest line, before and after the proofs.
MAX_PROOF, MAX_REQUEST, MAX_ANSWER = 512, 4096, 16 << 20

#: The file of a host's folder with its `Limits`.
LIMITS_FILE = "limits.json"

#: What is wrong with a peer that does not prove itself.
OTHER_TOKEN = f"does not have this run's token: give all hosts the same {TOKEN_FILE}"

type Nonce = Annotated[str, Meta(min_length=32, max_length=32)]
type Signature = Annotated[str, Meta(min_length=64, max_length=64)]


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the server."""

    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Shows that a peer has the token."""

    nonce: Nonce
    signature: Signature


class PieceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for."""

    do: Literal["list", "read", "write"]
    name: Annotated[str, Meta(max_length=200)] = ""
    begin: Count = 0
    size: Count = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a proof or to a request."""

    error: Name = ""
    signature: str = ""
    """To a proof."""
    files: dict[Name, Count] = {}
    """To "list": the bytes of each file."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a host takes from others, as its processes have planned."""

    session: Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]
    """Of the copies that they write (`places.Group`)."""
    last_step: Count
    """Of the run."""
    file_bytes: Count
    """The most bytes of a file."""
    all_bytes: Count
    """The most bytes of all files of the session."""


def line(message: msgspec.Struct) -> bytes:
    """Return a message as a line."""
    return declared.to_json(message).encode() + b"\n"


def new_nonce() -> str:
    """Return a text that is used once."""
    return secrets.token_hex(16)


def proof(token: RunToken, greeting: Greeting) -> Proof:
    """Return the client's proof."""
    own = new_nonce()
    return Proof(nonce=own, signature=token.sign("pieces, client", greeting.nonce, own))


def is_proven(token: RunToken, nonce: str, shown: Proof) -> bool:
    """Return whether a client has the token. Args:     nonce: that the server sent."""
    return token.has_signed(shown.signature, "pieces, client", nonce, shown.nonce)


def server_signature(token: RunToken, nonce: str, shown: Proof) -> str:
    """Return the server's proof."""
    return token.sign("pieces, server", nonce, shown.nonce)


#: Seconds to connect, and without any progress, after which a host counts as lost.
CONNECT_SECONDS, STALLED_SECONDS = 10.0, 60.0

#: Bytes that are sent by one call.
PIECE = 16 << 20


class HostLost(OSError):
    """The server of a host does not answer, or not as it should."""


class PieceClient:
    """A connection to the server of a host. Threads may share it.

    A request is a line of JSON, and so is the answer. Bytes of a file follow the answer to "read",
    and the request "write" once it is granted.
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
            shown = proof(token, greeting)
            self._socket.sendall(line(shown))
            expected = server_signature(token, greeting.nonce, shown)
        answer = self._answer(MAX_PROOF)
        if not hmac.compare_digest(answer.signature.encode(), expected.encode()):
            raise HostLost(f"{self.address} {OTHER_TOKEN}")

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
            self._socket.sendall(line(request))
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
