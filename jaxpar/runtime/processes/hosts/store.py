"""The launcher's side of the store: it writes and reads texts, and never waits.

Calls of JAX's client may hang while a link is cut. They run in a child process (`link.py`), which
is killed when it does not answer, and started again.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.hosts import link, service

#: Seconds between the ends and starts of a link that fails.
AGAIN_SECONDS = 0.5

#: Seconds for a link to start and to connect, on a busy host.
START_SECONDS = 20.0


@dataclass(frozen=True)
class Read:
    """The texts of the store at one moment."""

    texts: Mapping[str, str]
    asked: float
    """When the request was sent, by `time.monotonic`: the texts are not older than that."""


class Store:
    """A connection to the store, which is made again whenever it is lost."""

    def __init__(self, address: str, prefix: str, patience: float):
        """Args:     patience: seconds after which a link that does not answer is started again."""
        self.address, self._prefix, self._patience = address, prefix, patience
        self._process: subprocess.Popen | None = None
        self._ended = self._asked = float("-inf")
        self._answers: list[dict[str, Any]] = []
        self._ready = self._waiting = False
        self.trouble = ""
        """Why the store does not answer, while it does not."""

    def free(self) -> bool:
        """Return whether a request can be sent now; starts a link if there is none."""
        if self._process is None and time.monotonic() - self._ended > AGAIN_SECONDS:
            self._start()
        return self._ready and not self._waiting

    def ask(self, own: Mapping[str, str], create: Mapping[str, str]) -> None:
        """Send a request, once `free`. Args: own: texts to set. create: texts to set once."""
        assert self._process is not None and self._process.stdin is not None
        self._asked, self._waiting = time.monotonic(), True
        with contextlib.suppress(OSError):  # it has ended, which `answer` notices
            self._process.stdin.write(json.dumps({"set": own, "create": create}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Read | None:
        """Return the answer to the last request, once."""
        read = None
        while self._answers:
            said = self._answers.pop(0)
            if "connected" in said:
                self._ready = True
            elif "error" in said:
                self.trouble = said["error"]
            else:
                read, self._waiting, self.trouble = Read(said["texts"], self._asked), False, ""
        if read is None and self._process is not None:
            self._watch(self._process)
        return read

    def close(self) -> None:
        """End the link."""
        if self._process is not None:
            self._end(self._process)

    def _start(self) -> None:
        """Start a link, and a thread that takes its answers."""
        command = [sys.executable, "-m", link.__name__, self.address, self._prefix]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "4", "GRPC_VERBOSITY": "NONE"}
        self._answers, self._ready, self._waiting = [], False, False
        self._asked = time.monotonic()
        process = children.start_talking(command, os.environ | quiet)
        take = threading.Thread(target=_take, args=(process, self._answers), daemon=True)
        take.start()
        self._process = process

    def _watch(self, process: subprocess.Popen) -> None:
        """End a link that does not answer, and forget one that has ended."""
        late = time.monotonic() - self._asked
        limit = self._patience if self._ready else START_SECONDS
        if process.poll() is not None and not self._answers:
            self.trouble = self.trouble or "its connection was lost"
            self._end(process)
        elif (self._waiting or not self._ready) and late > limit:
            self.trouble = f"it has not answered for {late:.1f} s"
            self._end(process)

    def _end(self, process: subprocess.Popen) -> None:
        children.kill_group(process)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]
        self._process, self._ready, self._waiting = None, False, False
        self._ended = time.monotonic()


def _take(process: subprocess.Popen, answers: list[dict[str, Any]]) -> None:
    """Collect a link's answers until it ends."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # cut off by its end
                answers.append(json.loads(line))


class Service:
    """A coordination service in a child process (`service.py`)."""

    def __init__(self, address: str, nodes: int = 0):
        """Start it. Args: address: host:port to listen on. nodes: 0 for a store."""
        command = [sys.executable, "-m", service.__name__, address, str(nodes)]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "4", "GRPC_VERBOSITY": "NONE"}
        self.address = address
        self._process = children.start_talking(command, os.environ | quiet)

    def ended(self) -> int | None:
        """Return its exit code, None while it serves."""
        return self._process.poll()

    def wait_until_serving(self) -> bool:
        """Wait until it serves. Returns:  False if it has ended instead."""
        assert self._process.stdout is not None
        if self._process.stdout.readline():
            return True
        self._process.wait()
        return False

    def end(self) -> None:
        """End it at once."""
        children.kill_group(self._process)
