"""A process that tokenizes parts for another one, at a socket that it inherits.

It ends when the other process does. It imports neither JAX nor the caller's main module.
"""

import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.stream.index import PART
from jaxpar.data.stream.texts import PartEncoder
from jaxpar.runtime.exit_codes import RunError

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


# --------------------------- The worker processes of this process, which tokenize streamed datasets


_ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """A worker process, and the connection to it."""

    def __init__(self) -> None:
        """Start the process, which only knows the socket that it inherits."""
        self._ours, theirs = Pipe()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "jaxpar.data.stream.workers", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()

    def ask(self, number: int, folder: str, parts: np.ndarray) -> None:
        """Send a request. Raises: RunError if the process has ended."""
        try:
            self._ours.send((number, folder, parts.tobytes()))
        except OSError as error:
            raise self._ended() from error

    def answer(self, number: int) -> Reply:
        """Wait for the answer to a request. Raises: RunError if the process has ended."""
        while True:
            try:
                answered, reply = self._ours.recv()
            except (EOFError, OSError) as error:
                raise self._ended() from error
            if answered == number:  # others are of requests that were interrupted
                found: Reply = reply
                return found

    def _ended(self) -> RunError:
        code = self._process.wait()
        return RunError(f"a process that tokenizes a streamed dataset ended with code {code}")


class Pool:
    """Worker processes that share the parts of a request."""

    def __init__(self, count: int):
        self._workers = [Worker() for _ in range(count)]
        self._lock, self._numbers = threading.Lock(), itertools.count()

    def encode(self, folder: str, parts: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each part, as `PartEncoder.encode`.

        The same worker always gets the same part, which it may still have.

        Raises:   ConfigError and OSError as `PartEncoder.encode`; RunError if a worker has ended.
        """
        owner = parts["check"] % len(self._workers)
        shares = [np.flatnonzero(owner == i) for i in range(len(self._workers))]
        with self._lock:
            number = next(self._numbers)
            busy = [(w, at) for w, at in zip(self._workers, shares, strict=True) if len(at)]
            for worker, at in busy:
                worker.ask(number, folder, parts[at])
            replies = [worker.answer(number) for worker, _ in busy]
        found: list[np.ndarray] = [np.empty(0, np.int32)] * len(parts)
        for (_, at), reply in zip(busy, map(_checked, replies), strict=True):
            for i, ids in zip(at, reply, strict=True):
                found[i] = ids
        return found


def _checked(reply: Reply) -> Sequence[np.ndarray]:
    if isinstance(reply, tuple):
        raise ConfigError(*reply)
    if isinstance(reply, OSError):
        raise reply
    return reply


@functools.cache
def pool(count: int) -> Pool:
    """Return this process's pool of `count` workers, which all streamed datasets share."""
    return Pool(count)
