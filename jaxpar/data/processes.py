"""Processes that call a function for this one, each at a socket that it inherits.

A process ends when this one does. It imports neither JAX nor the caller's main module.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import RunError

#: What a message of a process is: something that the function says, its result, or its error.
SAID, DONE, FAILED = range(3)

_ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A process that calls a function of a module with the arguments that it is sent."""

    def __init__(self, function: Callable[..., Any], what: str, says: bool = False):
        """Start the process, which only knows the socket that it inherits.

        Args:     what: it does, for errors: "a process that ...". says: whether the last argument
                  of the function is one that it calls with what `answer` passes to `heard`.
        """
        self._ours, theirs = Pipe()
        self._what, self._number = what, 0
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "jaxpar.data.processes", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # One thread for NumPy's products: there are as many processes as cores.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        theirs.close()
        self._ours.send((function, says))

    def ask(self, *arguments: Any) -> None:
        """Send the arguments of a call. Raises: RunError if the process has ended."""
        self._number += 1
        try:
            self._ours.send((self._number, arguments))
        except OSError as error:
            raise self._ended() from error

    def answer(self, heard: Callable[[Any], None] = lambda said: None) -> Any:
        """Return the result of the last call.

        Raises:   what the function raises; RunError if the process has ended.
        """
        while True:
            try:
                number, kind, value = self._ours.recv()
            except (EOFError, OSError) as error:
                raise self._ended() from error
            if number != self._number:  # of a call that was interrupted
                continue
            if kind == SAID:
                heard(value)
            elif kind == FAILED:
                raise value
            else:
                return value

    def end(self) -> None:
        """End the process, which deletes what it has begun, and the calls that wait for it."""
        if self._ours.closed:
            return
        with socket.socket(fileno=os.dup(self._ours.fileno())) as both:
            both.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._ours.close()

    def _ended(self) -> RunError:
        return RunError(f"a process that {self._what} ended with code {self._process.wait()}")


class Processes:
    """Processes that share the calls of a function. Use as a context manager."""

    def __init__(self, function: Callable[..., Any], what: str, count: int, says: bool = False):
        """Args:     count: the most processes, which start with their first call. what, says: as
        of `Process`."""
        self._make = functools.partial(Process, function, what, says)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=what)
        self._mine, self._all = threading.local(), list[Process]()

    def call(self, *arguments: Any, heard: Callable[[Any], None] = lambda said: None) -> Future:
        """Return the result of a call, or its error, in future. Args:     heard: as `answer`."""
        return self._pool.submit(self._call, arguments, heard)

    def _call(self, arguments: tuple, heard: Callable[[Any], None]) -> Any:
        if not hasattr(self._mine, "process"):
            self._mine.process = self._make()
            self._all.append(self._mine.process)
        self._mine.process.ask(*arguments)
        return self._mine.process.answer(heard)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for wait in (False, True):
            self._pool.shutdown(wait, cancel_futures=True)
            for process in self._all:
                process.end()


def serve(connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    function, says = connection.recv()
    while True:
        number, arguments = connection.recv()

        def say(kind: int, value: Any, number: int = number) -> None:
            connection.send((number, kind, value))

        more = [lambda value, say=say: say(SAID, value)] if says else []
        try:
            found = function(*arguments, *more)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            say(FAILED, _sendable(error))
        else:
            say(DONE, found)


def _sendable(error: Exception) -> Exception:
    """Return an error of the input as it is, and another one, which is a fault, as its text."""
    if isinstance(error, ConfigError | OSError | RunError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def main(args: list[str]) -> None:
    """Serve at an inherited socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the process that asks; its end is ours
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        serve(Connection(int(args[0])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main(sys.argv[1:])
