"""A process that tokenizes parts for another one, at a socket that it inherits.

It ends when the other process does. It imports neither JAX nor the caller's main module.
"""

import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.stream.encoder import PartEncoder
from jaxpar.data.stream.index import PART

#: The tokens of each part; an error of a file; or field, value, rule and fix of a ConfigError.
type Reply = list[np.ndarray] | OSError | tuple[str, Any, str, str]


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed.

    A request is a number, a folder and the bytes of PART [parts]; the answer is the number, and the
    tokens of each part, or an error.
    """
    encoders: dict[str, PartEncoder] = {}
    while True:
        try:
            number, folder, packed = connection.recv()
        except EOFError:
            return
        connection.send((number, _answer(encoders, folder, packed)))


def _answer(encoders: dict[str, PartEncoder], folder: str, packed: bytes) -> Reply:
    try:
        if folder not in encoders:
            encoders[folder] = PartEncoder(folder)
        return encoders[folder].encode(np.frombuffer(packed, PART))
    except ConfigError as error:
        return error.field, error.value, error.rule, error.fix
    except OSError as error:
        return error


def main(args: list[str]) -> None:
    """Serve at an inherited socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the process that reads; its end is ours
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        serve(Connection(int(args[0])))
    except (BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main(sys.argv[1:])
