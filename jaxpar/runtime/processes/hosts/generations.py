"""Generations: the sets of hosts that train together, one after another. Pure functions.

The store has, for a run:

    host/NAME         what a host says of itself, rewritten all the time (`Host`)
    generation/G      the members of generation G, in their order (`Generation`)
    over/G            why generation G ended (`Over`)
    end/G             the exit code of the run, which ended with generation G (`End`)

The last three are written once. Any launcher may write them, and the first one counts, so that
launchers that see different things still do the same.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from jaxpar.runtime.processes.hosts.addresses import joined


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A value of the store, as JSON."""

    def as_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Self:
        told: dict[str, Any] = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()})


@dataclass(frozen=True, kw_only=True)
class Host(_Entry):
    """What a launcher says of its host."""

    name: str
    life: str
    """Differs each time that a launcher starts: a host that comes back is another one."""
    address: str
    port: int
    """A free port of this host, for the coordinator of the next generation."""
    devices: int
    processes: int
    ready: int
    """The first generation that the host could be in: it runs no processes of earlier ones."""
    leaving: bool = False
    """It was asked to stop, and takes part in no further generation."""
    done: int = 0
    """The generation whose processes have all ended here with code 0."""
    left: bool = False
    """Its launcher ends."""
    piece_port: int = 0
    """Where it serves copies of the state in its memory; 0: nowhere."""
    in_memory: int = -1
    """The step of the latest copy of which it has a piece; -1 without any."""
    stepped: int = 0
    """The generation whose first step is done, as its first host tells."""
    count: int = 0
    """Rises with each rewrite, as a sign of life."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What decides whether a failed run starts again, handed from generation to generation."""

    spent: int = 0
    """Restarts after failures since the last new checkpoint."""
    saved: int = -1
    """The latest checkpoint when the generation began."""
    code: int = 0
    step: int | None = None
    error: str = ""
    """Of the last failure."""
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Generation(_Entry):
    """The hosts that train together, and how their processes connect."""

    number: int
    members: tuple[str, ...]
    lives: tuple[str, ...]
    counts: tuple[int, ...]
    """Processes of each member."""
    coordinator: str
    """host:port, at the first member's."""
    resumed: bool
    """There was a generation before: it goes on from the latest checkpoint."""
    why: str
    restarts: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    """Hosts that the generation before has lost."""
    pieces: tuple[str, ...] = ()
    """host:port of each member's server of pieces; empty if the run keeps no copies."""
    spare: tuple[str, ...] = ()
    """Hosts that are ready too, and not members."""
    silent: float = 0.0
    """Seconds without a sign of life after which they were declared lost."""

    @property
    def processes(self) -> int:
        return sum(self.counts)

    def first_rank(self, name: str) -> int:
        """Return the rank of a member's first process."""
        return sum(self.counts[: self.members.index(name)])

    def host_of(self, rank: int) -> str:
        """Return the member that runs a process."""
        return next(m for m in reversed(self.members) if self.first_rank(m) <= rank)


@dataclass(frozen=True, kw_only=True)
class Over(_Entry):
    """Why a generation ended."""

    kind: Literal["lost", "failed", "join", "stopped"]
    text: str
    hosts: tuple[str, ...] = ()
    """The lost hosts, or those that join."""
    silent: float = 0.0
    code: int = 0
    """Of a failure, with step, error and rank, as in `children.Failure`."""
    step: int | None = None
    error: str = ""
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class End(_Entry):
    """The run has ended."""

    code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class StoreView:
    """The store as one launcher reads it, with the hosts that are alive."""

    hosts: Mapping[str, Host]
    alive: Set[str]
    generations: Mapping[int, Generation]
    overs: Mapping[int, Over]
    ends: Mapping[int, End]

    @property
    def latest(self) -> Generation | None:
        return self.generations[max(self.generations)] if self.generations else None

    @property
    def over(self) -> Over | None:
        """Why the latest generation ended; None while it trains."""
        return self.overs.get(max(self.generations, default=0))

    def there(self) -> list[Host]:
        """The hosts that can train: alive, and not asked to stop. By name."""
        return [h for name, h in sorted(self.hosts.items()) if name in self.alive and not h.leaving]

    def absent(self, generation: Generation) -> list[str]:
        """Return the members that are not alive, or that have started again since."""
        lives = zip(generation.members, generation.lives, strict=True)
        return [m for m, life in lives if m not in self.alive or self.hosts[m].life != life]

    def left_by(self, generation: Generation) -> list[str]:
        """Return the members that are absent, or that have given the generation up."""
        gone = self.absent(generation)
        return [
            m for m in generation.members if m in gone or self.hosts[m].ready > generation.number
        ]


def view(texts: Mapping[str, str], alive: Set[str]) -> StoreView:
    """Read the texts of the store. Args: alive: names of hosts, from `Liveness`."""
    parts: dict[str, dict[str, str]] = {"host": {}, "generation": {}, "over": {}, "end": {}}
    for key, text in texts.items():
        kind, _, name = key.partition("/")
        parts[kind][name] = text
    numbered = lambda kind, form: {int(n): form.of(t) for n, t in parts[kind].items()}  # noqa: E731
    return StoreView(
        hosts={name: Host.of(text) for name, text in parts["host"].items()},
        alive=alive,
        generations=numbered("generation", Generation),
        overs=numbered("over", Over),
        ends=numbered("end", End),
    )


def in_order(hosts: Sequence[Host], before: Generation | None) -> list[Host]:
    """Order hosts: those that trained before keep their order, the others follow by name."""
    places = {m: i for i, m in enumerate(before.members)} if before else {}
    return sorted(hosts, key=lambda h: (places.get(h.name, len(places)), h.name))


def chosen(
    hosts: Sequence[Host], least: int, most: int, fits: Callable[[int], bool]
) -> list[Host] | None:
    """Choose the members of a generation: as many hosts as can train.

    Args:     hosts: in their order. least, most: limits on their number. fits: whether a number of
              devices can divide the batch.
    Returns:  the first hosts, as many as can train; None if none can.
    """
    for count in range(min(len(hosts), most), least - 1, -1):
        if fits(sum(host.devices for host in hosts[:count])):
            return list(hosts[:count])
    return None


def next_generation(
    number: int,
    members: Sequence[Host],
    before: Generation | None,
    over: Over | None,
    restarts: Restarts,
) -> Generation:
    """Return the generation that these hosts form. Args: before, over: the one before, if any."""
    first = members[0]
    return Generation(
        number=number,
        members=tuple(host.name for host in members),
        lives=tuple(host.life for host in members),
        counts=tuple(host.processes for host in members),
        coordinator=joined(first.address, first.port),
        pieces=tuple(joined(h.address, h.piece_port) for h in members if h.piece_port),
        resumed=before is not None,
        why=over.text if over is not None else "start",
        restarts=dataclasses.asdict(restarts),
        silent=over.silent if over is not None else 0.0,
    )


def lost_of(seen: StoreView, before: Generation, over: Over) -> list[str]:
    """Return the hosts that a generation has lost: also those whose loss made another one fail."""
    if over.kind not in ("lost", "failed"):
        return []
    known = over.hosts if over.kind == "lost" else ()
    return [m for m in before.members if m in known or m in seen.absent(before)]


def newcomers(
    seen: StoreView, generation: Generation, least: int, most: int, fits: Callable[[int], bool]
) -> list[str]:
    """Return the hosts that wait, if a generation with them would have more members than now."""
    able = [h for h in seen.there() if h.name in generation.members or h.ready > generation.number]
    better = chosen(in_order(able, generation), least, most, fits)
    if better is None or len(better) <= len(generation.members):
        return []
    return [host.name for host in better if host.name not in generation.members]


def lost_text(hosts: Sequence[str], silent: float, by: str) -> str:
    """Describe a loss."""
    names = ", ".join(hosts)
    gone = f"no sign of life for {silent:.1f} s" if silent else "it has started again"
    return f"lost {names}: {gone} (seen by {by})"
