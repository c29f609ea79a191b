"""Which hosts are alive: those whose entry in the store has changed lately.

Every launcher rewrites its entry, with a count, about four times per heartbeat limit. An observer
notes when it last saw a change, by its own monotonic clock, so that clocks of hosts do not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
