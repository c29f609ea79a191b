"""This host's membership: its entry in the store, and what it reads there."""

import dataclasses
import hashlib
import time
import uuid
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.runtime.processes.hosts.addresses import FreePort
from jaxpar.runtime.processes.hosts.generations import Host, StoreView, view
from jaxpar.runtime.processes.hosts.liveness import Liveness
from jaxpar.runtime.processes.hosts.store import Read, Store

#: Signs of life within the limit after which a host counts as lost.
SIGNS = 5

#: Seconds between two looks while no generation trains.
EAGER_SECONDS = 0.25


class Membership:
    """The entry of this host, rewritten all the time, and the latest view of the others."""

    def __init__(self, rendezvous: str, run: str, own: dict[str, Any], limit: float):
        """Register this host.

        Args:     rendezvous: host:port. run: names the run, as other runs may use the same store.
                  own: fields of `Host`. limit: seconds without a sign of life.
        """
        prefix = f"jaxpar/{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.limit, self._every = limit, limit / SIGNS
        self.store = Store(rendezvous, prefix, limit)
        self._held = FreePort(own["address"])
        self.own = Host(life=uuid.uuid4().hex, port=self._held.number, ready=1, **own)
        self.liveness = Liveness(limit)
        self.view: StoreView | None = None
        """The latest view; None before the first one."""
        self.contact = time.monotonic()
        """When the store was known to answer last."""
        self.eager = True
        """Look often, since no generation trains."""
        self._asked, self._changed = float("-inf"), True
        self._create: dict[str, str] = {}

    def say(self, **fields: Any) -> None:
        """Change fields of this host's entry, at the next turn."""
        if any(getattr(self.own, name) != value for name, value in fields.items()):
            self.own = dataclasses.replace(self.own, **fields)
            self._changed = True

    def create(self, key: str, text: str) -> None:
        """Write a text once, unless another launcher has written it already."""
        self._create.setdefault(key, text)
        self._changed = True

    def hurry(self) -> None:
        """Exchange texts at the next turn."""
        self._changed = True

    def new_port(self) -> None:
        """Offer another port, once the earlier one has been used."""
        self._held.release()
        self._held = FreePort(self.own.address)
        self.say(port=self._held.number)

    def turn(self) -> StoreView | None:
        """Exchange texts with the store, without waiting. Returns:  a view, if there is a new one.

        Raises:   ConfigError if another launcher has this host's name.
        """
        read = self.store.answer()
        if read is not None:
            self._take(read)
        every = min(self._every, EAGER_SECONDS) if self.eager else self._every
        due = self._changed or time.monotonic() - self._asked > every
        if due and self.store.free():
            self._asked, self._changed = time.monotonic(), False
            self.own = dataclasses.replace(self.own, count=self.own.count + 1)
            self.store.ask({f"host/{self.own.name}": self.own.as_text()}, self._create)
        return self.view if read is not None else None

    def _take(self, read: Read) -> None:
        now = time.monotonic()
        if now - self.contact > self.limit / 2:
            self.liveness.forgive(now)
        self.contact = read.asked
        self._create = {k: text for k, text in self._create.items() if k not in read.texts}
        entries = {k.removeprefix("host/"): t for k, t in read.texts.items() if k[:5] == "host/"}
        self.liveness.note(entries, now)
        self.view = view(read.texts, self.liveness.alive(now) | {self.own.name})
        if self.view.hosts[self.own.name].life != self.own.life:
            rule = "is the name of another launcher of this run"
            fix = "give each host its own: --host-name NAME"
            raise ConfigError("--host-name", self.own.name, rule, fix)

    def silent(self) -> float:
        """Return the seconds since the store was known to answer."""
        return time.monotonic() - self.contact

    def close(self) -> None:
        """End the connection."""
        self.store.close()
        self._held.release()
