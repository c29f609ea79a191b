"""This host's membership: its entry in the store, what it reads there, and which hosts are alive.

Alive are those whose entry in the store has changed lately. Every launcher rewrites its entry, with
a count, about four times per heartbeat limit. An observer notes when it last saw a change, by its
own monotonic clock, so that clocks of hosts do not matter.
"""

import dataclasses
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.runtime.processes.children import Clock
from jaxpar.runtime.processes.hosts.generations import Host, StoreView, view
from jaxpar.runtime.processes.hosts.kv_store import PassedOver, Read, Store


@dataclass
class Liveness:
    """What one launcher has seen of the others."""

    limit: float
    """Seconds without a change after which a host counts as lost."""
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By host: its last text, and when that text was first seen."""
    _looked: bool = False
    _fresh: set[str] = field(default_factory=set)
    """Hosts whose entry has changed since this launcher first saw it."""

    def note(self, entries: Mapping[str, str], now: float) -> None:
        """Take note of the entries of the other hosts, read at the time `now`.

        An entry of the first look may be that of a host which is long gone. It counts as a sign of
        life only once it changes.
        """
        for host, text in entries.items():
            known = self._seen.get(host)
            if known is None or known[0] != text:
                self._seen[host] = (text, now)
                if known is not None or self._looked:
                    self._fresh.add(host)
        self._looked = True

    def alive(self, now: float) -> set[str]:
        """Return the hosts that have shown a sign of life within the limit."""
        return {host for host in self._fresh if self.silent(host, now) <= self.limit}

    def unknown(self, now: float) -> set[str]:
        """Return the hosts of the first look that may be alive: their limit has not yet passed."""
        waits = self._seen.keys() - self._fresh
        return {host for host in waits if self.silent(host, now) <= self.limit}

    def silent(self, host: str, now: float) -> float:
        """Return the seconds since a host's last sign of life; infinite if there was none."""
        return now - self._seen[host][1] if host in self._seen else float("inf")

    def forgive(self, now: float) -> None:
        """Start the limits anew: the store did not answer for a while, so nobody could be seen."""
        self._seen = {host: (text, now) for host, (text, _) in self._seen.items()}


#: Signs of life within the limit after which a host counts as lost.
SIGNS = 5

#: Seconds between two looks while no generation trains.
EAGER_SECONDS = 0.25


class Membership:
    """The entry of this host, rewritten all the time, and the latest view of the others."""

    def __init__(self, store: Store, own: Mapping[str, Any], limit: float, clock: Clock = time):
        """Args:     own: fields of `Host`. limit: seconds without a sign of life."""
        self.store, self._clock, self._pass_over = store, clock, PassedOver()
        self.limit, self._every = limit, limit / SIGNS
        self._held = FreePort(own["address"])
        self.own = Host(life=uuid.uuid4().hex, port=self._held.number, ready=1, **own)
        self.liveness = Liveness(limit)
        self.view: StoreView | None = None
        """The latest view; None before the first one."""
        self.contact = clock.monotonic()
        """When the store was known to answer last."""
        self.eager = True
        """Look often, since no generation trains."""
        self._asked, self._changed = float("-inf"), True
        self._create: dict[str, str] = {}
        self._known: dict[str, Host] = {}

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
        self._held.close()
        self._held = FreePort(self.own.address)
        self.say(port=self._held.number)

    def pending(self) -> bool:
        """Return whether the next turn would write something."""
        return self._changed and self.store.free()

    def turn(self) -> StoreView | None:
        """Exchange texts with the store, without waiting. Returns:  a view, if there is a new one.

        Raises:   ConfigError if another launcher has this host's name.
        """
        seen = self._taken(self.store.answer())
        every = min(self._every, EAGER_SECONDS) if self.eager else self._every
        due = self._changed or self._clock.monotonic() - self._asked > every
        if due and self.store.free():
            self._asked, self._changed = self._clock.monotonic(), False
            self.own = dataclasses.replace(self.own, count=self.own.count + 1)
            self.store.ask({f"host/{self.own.name}": self.own.as_text()}, self._create)
            seen = self._taken(self.store.answer()) or seen  # one in this process has answered
        return seen

    def _taken(self, read: Read | None) -> StoreView | None:
        """Take note of an answer, if there is one, and return the new view."""
        if read is None:
            return None
        now = self._clock.monotonic()
        if now - self.contact > self.limit / 2:
            self.liveness.forgive(now)
        self.contact = read.asked
        self._create = {k: text for k, text in self._create.items() if k not in read.texts}
        seen, name = view(read.texts, frozenset()), self.own.name
        for key, why in seen.unread.items():
            self._pass_over(key, why)
        others = {each: read.texts[f"host/{each}"] for each in seen.hosts if each != name}
        self.liveness.note(others, now)
        alive = self.liveness.alive(now) | {name}
        # A store that has started again lacks hosts that have not written yet.
        lacking = {each: host for each, host in self._known.items() if each in alive}
        self._known |= seen.hosts
        hosts = {name: self.own} | lacking | dict(seen.hosts)
        self.view = StoreView(
            hosts=hosts,
            alive=alive & hosts.keys(),
            generations=seen.generations,
            overs=seen.overs,
            ends=seen.ends,
        )
        if hosts[name].life != self.own.life:
            rule = "is the name of another launcher of this run"
            raise ConfigError("--host-name", name, rule, "give each host its own: --host-name NAME")
        return self.view

    def silent(self) -> float:
        """Return the seconds since the store was known to answer."""
        return self._clock.monotonic() - self.contact

    def close(self) -> None:
        """End the connection."""
        self.store.close()
        self._held.close()
