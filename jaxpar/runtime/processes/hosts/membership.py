"""This host's membership: its entry in the store, and what it reads there.

JAX's service serves everybody who reaches its port. So each launcher signs what it writes with the
run's token, and passes over what is not signed. The signature is also part of the key: a stranger
cannot occupy the key of an entry that is written once.
"""

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.printable import printable
from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes.addresses import FreePort
from jaxpar.runtime.processes.hosts.generations import Host, StoreView, view
from jaxpar.runtime.processes.hosts.liveness import Liveness
from jaxpar.runtime.processes.hosts.store import Read, Store
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken

#: Signs of life within the limit after which a host counts as lost.
SIGNS = 5

#: Most entries that are named as passed over: a stranger could write any number of them.
MAX_WARNINGS = 20

#: Seconds between two looks while no generation trains.
EAGER_SECONDS = 0.25


class Membership:
    """The entry of this host, rewritten all the time, and the latest view of the others."""

    def __init__(
        self, rendezvous: str, run: str, own: dict[str, Any], limit: float, token: RunToken
    ):
        """Register this host.

        Args:     rendezvous: host:port. run: names the run, as other runs may use the same store.
                  own: fields of `Host`. limit: seconds without a sign of life. token: of the run.
        """
        self._run, self._token, self._warned = run, token, set[str]()
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
            own = self._signed({f"host/{self.own.name}": self.own.as_text()})
            self.store.ask(own, self._signed(self._create))
        return self.view if read is not None else None

    def _signed(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return texts as they are in the store, by their keys there."""
        sign = self._token.sign
        return {
            f"{key}/{sign('key', self._run, key)}": f"{sign('text', self._run, key, text)} {text}"
            for key, text in texts.items()
        }

    def _verified(self, stored: Mapping[str, str]) -> dict[str, str]:
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

    def _pass_over(self, key: str, why: str) -> None:
        """Warn of an entry, once."""
        if key in self._warned or len(self._warned) >= MAX_WARNINGS:
            return
        self._warned.add(key)
        name = printable("/".join(key.split("/")[:2]))[:100]
        warn(f"the entry {name} of the rendezvous is passed over: {why}")

    def _take(self, read: Read) -> None:
        now = time.monotonic()
        if now - self.contact > self.limit / 2:
            self.liveness.forgive(now)
        self.contact = read.asked
        texts = self._verified(read.texts)
        self._create = {k: text for k, text in self._create.items() if k not in texts}
        seen = view(texts, frozenset())
        for key, why in seen.unread.items():
            self._pass_over(key, why)
        self.liveness.note({name: texts[f"host/{name}"] for name in seen.hosts}, now)
        alive = self.liveness.alive(now) | {self.own.name}
        # A store that has started again lacks hosts that have not written yet.
        lacking = {name: host for name, host in self._known.items() if name in alive}
        self._known |= seen.hosts
        hosts = {self.own.name: self.own} | lacking | dict(seen.hosts)
        self.view = StoreView(
            hosts=hosts,
            alive=alive & hosts.keys(),
            generations=seen.generations,
            overs=seen.overs,
            ends=seen.ends,
            unread=seen.unread,
        )
        if hosts[self.own.name].life != self.own.life:
            rule = "is the name of another launcher of this run"
            fix = "give each host its own: --host-name NAME"
            raise ConfigError("--host-name", self.own.name, rule, fix)

    def silent(self) -> float:
        """Return the seconds since the store was known to answer."""
        return time.monotonic() - self.contact

    def close(self) -> None:
        """End the connection."""
        self.store.close()
        self._held.close()
