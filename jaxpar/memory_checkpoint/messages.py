"""What hosts say to one another about files of pieces, and how they prove that they may.

Each message is a line of JSON. The server sends a nonce first. The client answers with a nonce of
its own and the signature of both by the run's token, and the server with another signature. A
stranger who listens learns nothing from these. Only then does the server read requests, within the
limits that the run has planned (`Limits`).
"""

import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxpar.config import declared
from jaxpar.config.declared import Count, Name
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
