"""The launcher's side of the key-value store: it writes and reads texts, and never waits.

The launcher of a run on one host has the store in its own process. Those of several hosts share a
service, whose client may hang while a link is cut. Its calls run in a child process (`link.py`),
which is killed when it does not answer, and started again.

JAX's service serves everybody who reaches its port. So each launcher signs what it writes with the
run's token, and passes over what is not signed. The signature is also part of the key: a stranger
cannot occupy the key of an entry that is written once.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.config.printable import printable
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import Clock
from jaxpar.runtime.processes.hosts import link, service
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken
from jaxpar.runtime.terminal import warn

#: Most entries that are named as passed over: a stranger could write any number of them.
MAX_WARNINGS = 20


class PassedOver:
    """Warns of each entry that is passed over, once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, key: str, why: str) -> None:
        if key in self._warned or len(self._warned) >= MAX_WARNINGS:
            return
        self._warned.add(key)
        name = printable("/".join(key.split("/")[:2]))[:100]
        warn(f"the entry {name} of the rendezvous is passed over: {why}")


class Signatures:
    """Those of one run's entries, with its token."""

    def __init__(self, run: str, token: RunToken):
        """Args:     run: names the run, as other runs may use the same store."""
        self._run, self._token, self._pass_over = run, token, PassedOver()

    def signed(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return texts as they are in the store, by their keys there."""
        sign = self._token.sign
        return {
            f"{key}/{sign('key', self._run, key)}": f"{sign('text', self._run, key, text)} {text}"
            for key, text in texts.items()
        }

    def verified(self, stored: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the store that have been signed with the run's token."""
        texts, has_signed = {}, self._token.has_signed
        for place, signed in stored.items():
            key, _, of_key = place.rpartition("/")
            signature, _, text = signed.partition(" ")
            if has_signed(of_key, "key", self._run, key) and has_signed(
                signature, "text", self._run, key, text
            ):
                texts[key] = text
            else:
                why = "it is not signed with this run's token; if it is from a host of this run, "
                self._pass_over(place, f"{why}give all hosts the same {TOKEN_FILE}")
        return texts


#: Seconds between the ends and starts of a link that fails.
AGAIN_SECONDS = 0.5

#: Connections to the store.
LINKS = 2

#: The share of a link's patience after which a request is sent through the other one too.
SOON = 0.4

#: Seconds for a link to start and to connect, on a busy host.
START_SECONDS = 20.0


@dataclass(frozen=True)
class Read:
    """The texts of the store at one moment."""

    texts: Mapping[str, str]
    asked: float
    """When the request was first sent, by `time.monotonic`: the texts are not older than that."""


class LocalStore:
    """A store in this process, which answers at once."""

    trouble = ""
    """Why the store does not answer, while it does not."""

    def __init__(self, texts: dict[str, str], clock: Clock = time):
        """Args:     texts: that it starts with, and keeps."""
        self._texts, self._clock = texts, clock
        self._read: Read | None = None

    def free(self) -> bool:
        """Return whether a request can be sent now."""
        return self._read is None

    def ask(self, own: Mapping[str, str], create: Mapping[str, str]) -> None:
        """Send a request, once `free`. Args: own: texts to set. create: texts to set once."""
        self._texts |= {**create, **self._texts, **own}
        self._read = Read(dict(self._texts), self._clock.monotonic())

    def answer(self) -> Read | None:
        """Return the answer to the last request, once."""
        read, self._read = self._read, None
        return read

    def close(self) -> None:
        """End the connection."""


class SharedStore:
    """Two connections to the service that has the store, each made again whenever it is lost.

    A lost packet can hold up a connection for seconds, since TCP doubles its waits. So a request
    that is not answered soon is sent through the other connection too. The first answer counts.
    """

    def __init__(self, address: str, run: str, token: RunToken, patience: float):
        """
        Args:     run: names the run, as other runs may use the same service. patience: seconds
                  after which a link that does not answer is started again.
        """
        self.signatures = Signatures(run, token)
        prefix = f"jaxpar/{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self._command = [sys.executable, "-m", link.__name__, address, prefix]
        self._patience = patience
        self.links: list[Connection] = []
        """Those that run."""
        self._ended = float("-inf")
        self._request: StoreRequest | None = None
        self.trouble = ""

    def free(self) -> bool:
        """As `Store.free`; starts links that are missing."""
        ready = [each for each in self.links if each.ready]
        # The second one once the first one is ready, so that a busy host starts one at a time.
        missing = len(self.links) < min(len(ready) + 1, LINKS)
        if missing and time.monotonic() - self._ended > AGAIN_SECONDS:
            self.links.append(Connection(self._command))
        return self._request is None and any(each.idle() for each in ready)

    def ask(self, own: Mapping[str, str], create: Mapping[str, str]) -> None:
        texts = {"set": self.signatures.signed(own), "create": self.signatures.signed(create)}
        self._request = StoreRequest(json.dumps(texts), time.monotonic())
        self._send(self._request)

    def answer(self) -> Read | None:
        read = None
        for each in list(self.links):
            for said in each.heard():
                if "error" in said:
                    self.trouble = said["error"]
                elif "texts" in said and (request := each.answered()) is not None:
                    read = Read(self.signatures.verified(said["texts"]), request.sent)
                    self._request, self.trouble = None, ""
        if read is not None:
            self._end_late_ones()
        self._watch()
        request = self._request
        if request is not None and time.monotonic() - request.sent > self._patience * SOON:
            self._send(request)
        return read

    def close(self) -> None:
        for each in self.links:
            each.end()
        self.links = []

    def _send(self, request: "StoreRequest") -> None:
        """Send a request through a link that is idle, unless it is under way in all of them."""
        idle = [each for each in self.links if each.ready and each.idle()]
        if idle:
            idle[0].send(request)

    def _end_late_ones(self) -> None:
        """End links that still have a request: they could write it over a later one's texts."""
        for each in list(self.links):
            if not each.idle():
                self._end(each)

    def _end(self, each: "Connection") -> None:
        each.end()
        self.links.remove(each)
        self._ended = time.monotonic()

    def _watch(self) -> None:
        """End links that do not answer, and forget those that have ended."""
        for each in list(self.links):
            late = each.late()
            lost = each.ended()
            if lost:
                self.trouble = self.trouble or "its connection was lost"
            elif late > (self._patience if each.ready else START_SECONDS):
                self.trouble = f"it has not answered for {late:.1f} s"
            else:
                continue
            self._end(each)
        under_way = [each.request for each in self.links]
        if not any(each is self._request for each in under_way):
            self._request = None  # to be asked again


type Store = LocalStore | SharedStore


@dataclass(frozen=True, eq=False)
class StoreRequest:
    """What is asked, and when it was first sent, by `time.monotonic`."""

    line: str
    sent: float


class Connection:
    """A client of the store in a child process (`link.py`), and a thread that takes its answers."""

    def __init__(self, command: list[str]):
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "4", "GRPC_VERBOSITY": "NONE"}
        self.ready = False
        self.request: StoreRequest | None = None
        """The request that it has not answered yet."""
        self._since = time.monotonic()
        self._answers: list[dict[str, Any]] = []
        self.process = children.start_talking(command, os.environ | quiet)
        take = threading.Thread(target=_take, args=(self.process, self._answers), daemon=True)
        take.start()

    def idle(self) -> bool:
        """Return whether it has answered all requests."""
        return self.request is None

    def send(self, request: StoreRequest) -> None:
        """Send a request, while idle."""
        assert self.process.stdin is not None
        self.request, self._since = request, time.monotonic()
        with contextlib.suppress(OSError):  # it has ended, which `ended` notices
            self.process.stdin.write(request.line + "\n")
            self.process.stdin.flush()

    def heard(self) -> list[dict[str, Any]]:
        """Return what it has said since the last call."""
        said = []
        while self._answers:
            said.append(self._answers.pop(0))
            self.ready = self.ready or "connected" in said[-1]
        return said

    def answered(self) -> StoreRequest | None:
        """Return the request that an answer belongs to, and make the link idle."""
        request, self.request = self.request, None
        return request

    def late(self) -> float:
        """Return the seconds that it has taken to start, or to answer; 0 while idle."""
        return 0.0 if self.ready and self.idle() else time.monotonic() - self._since

    def ended(self) -> bool:
        """Return whether its process has ended and all it has said was heard."""
        return self.process.poll() is not None and not self._answers

    def end(self) -> None:
        """End it at once."""
        self.process.end()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]


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
        self.process = children.start_talking(command, os.environ | quiet)

    def ended(self) -> int | None:
        """Return its exit code, None while it serves."""
        return self.process.poll()

    def wait_until_serving(self) -> bool:
        """Wait until it serves. Returns:  False if it has ended instead."""
        assert self.process.stdout is not None
        if self.process.stdout.readline():
            return True
        self.process.wait()
        return False

    def end(self) -> None:
        """End it at once."""
        self.process.end()
