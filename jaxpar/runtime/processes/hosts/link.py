"""A client of the store, in a child process: JAX's client ends its process on a lost link.

    python -m jaxpar.runtime.processes.hosts.link ADDRESS:PORT PREFIX

It reads requests from standard input, one JSON object a line, and answers each with a line:

    {"set": {KEY: TEXT}, "create": {KEY: TEXT}}   ->   {"texts": {KEY: TEXT}}

`set` replaces a text, `create` writes it only if there is none: of several launchers that create
one key, the first has it. The answer holds all texts below the prefix, read after the writes.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.jax_private.table import SERVICE
from jaxpar.runtime.processes.hosts.service import NO_HEARTBEAT

#: Seconds to wait for the service at the start; the launcher starts another link after that.
CONNECT_SECONDS = 5

#: Most bytes of an entry; a larger one is read as an empty text.
MAX_BYTES = 16 << 20


def main(argv: Sequence[str]) -> int:
    """Answer requests until standard input closes."""
    address, prefix = argv
    try:
        client = connected(address)
    except OSError as error:
        return _say({"error": f"{address.rpartition(':')[0]}: {error.strerror}"})
    except RuntimeError as error:
        return _say({"error": _plain(error)})
    _say({"connected": address})
    for line in sys.stdin:
        try:
            answer = {"texts": answered(client, prefix, json.loads(line))}
        except RuntimeError as error:
            return _say({"error": _plain(error)})
        _say(answer)
    os._exit(0)  # not through JAX's shutdown, which needs the service


def connected(address: str) -> Any:
    """Return a client that has registered at the service.

    Raises:   OSError if the host's name is unknown; RuntimeError if the service does not answer.
    """
    host, _, port = address.rpartition(":")
    socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    client = SERVICE.load().get_distributed_runtime_client(
        address,
        0,
        init_timeout=CONNECT_SECONDS,
        heartbeat_timeout=NO_HEARTBEAT,
        shutdown_on_destruction=False,
    )
    client.connect()
    return client


def answered(client: Any, prefix: str, request: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Write what a request asks for, and return all texts by key."""
    for key, text in request["create"].items():
        try:
            client.key_value_set(f"{prefix}/{key}", text)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
    for key, text in request["set"].items():
        client.key_value_set(f"{prefix}/{key}", text, allow_overwrite=True)
    found = client.key_value_dir_get_bytes(f"{prefix}/")
    return {key.removeprefix(f"{prefix}/"): _as_text(content) for key, content in found}


def _as_text(content: bytes) -> str:
    """Return a text of the store, in which strangers may write anything."""
    return content.decode(errors="replace") if len(content) <= MAX_BYTES else ""


def _plain(error: Exception) -> str:
    """Return the first line of an error of gRPC, without its addresses in every notation."""
    return str(error).partition("\n")[0].partition("; last error")[0]


def _say(answer: Mapping[str, Any]) -> int:
    print(json.dumps(answer), flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
