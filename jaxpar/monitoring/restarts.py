"""What a run's restarts cost, and from where it resumed: in memory, or on the disk."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxpar.monitoring.goodput import goodput

#: The event of a start that has restored a state, and the parts of a start that only it needs.
RESTORED, OF_A_START = "restored", ("init", "compile", "restore")


@dataclass(frozen=True)
class RestartCosts:
    """The restarts of a run so far."""

    count: int
    down: float
    """Seconds between attempts."""
    starting: float
    """Seconds of all starts but the first."""
    repeated: float
    """Seconds of steps that were repeated, as far as they were recorded."""
    repeated_steps: int
    """Steps that were repeated."""
    sources: dict[str, int]
    """RestartCosts by where the state was: "memory" or "checkpoint"."""

    @property
    def seconds(self) -> float:
        """The time lost."""
        return self.down + self.starting + self.repeated

    def __str__(self) -> str:
        counted = "1 restart" if self.count == 1 else f"{self.count} restarts"
        text = f"{counted} cost {self.seconds:.1f} s: starting {self.starting:.1f}, down "
        text += f"{self.down:.1f}, repeated steps {self.repeated:.1f} ({self.repeated_steps} steps)"
        sources = ", ".join(f"{n} from {where}" for where, n in sorted(self.sources.items()))
        return f"{text}; {sources}" if sources else text


def restarts(events: Iterable[dict[str, Any]]) -> RestartCosts | None:
    """Compute what restarts cost; None for a run without any.

    Args:     events: from `read_events`.
    """
    events = list(events)
    found = goodput(events)
    if found.attempts < 2:
        return None
    first = min(event["attempt"] for event in events)
    again = [event for event in events if event["attempt"] != first]
    parts = [event["seconds"] for event in again if event["event"] == "time"]
    starting = sum(spent.get(name, 0.0) for spent in parts for name in OF_A_START)
    restored = [event for event in again if event["event"] == RESTORED]
    return RestartCosts(
        found.attempts - 1,
        found.seconds.get("down", 0.0),
        starting,
        found.seconds.get("lost work", 0.0),
        sum(event["repeated"] for event in restored),
        dict(Counter(event["source"] for event in restored)),
    )
