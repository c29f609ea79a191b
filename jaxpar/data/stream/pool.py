"""The worker processes of this process, which tokenize streamed datasets."""

import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.stream.worker import Reply
from jaxpar.runtime.exit_codes import RunError

_ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """A worker process, and the connection to it."""

    def __init__(self) -> None:
        """Start the process, which only knows the socket that it inherits."""
        self._ours, theirs = Pipe()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "jaxpar.data.stream.worker", str(theirs.fileno())]
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
