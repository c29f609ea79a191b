"""Generations: the sets of hosts that train together, one after another, and how they are formed.

The store has, for a run:

    host/NAME         what a host says of itself, rewritten all the time (`Host`)
    generation/G      the members of generation G, in their order (`Generation`)
    over/G            why generation G ended (`Over`)
    end/G             the exit code of the run, which ended with generation G (`End`)

The last three are written once. Any launcher may write them, and the first one counts, so that
launchers that see different things still do the same. An entry that this version cannot read is
passed over: launchers of a run may have different versions. Which hosts form the next generation,
and whether there is one, pure functions decide.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal, Self

from msgspec import Meta

from jaxpar.config import declared
from jaxpar.config.declared import Count, Misshapen, Name, Port
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.config.numerals import only_digits
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.addresses import joined
from jaxpar.runtime.processes.children import Failure
from jaxpar.runtime.processes.hosts.link import MAX_BYTES

#: A step of the run; -1: none.
type Step = Annotated[int, Meta(ge=-1, le=1 << 62)]

#: A number of processes or devices of a host.
type Several = Annotated[int, Meta(ge=0, le=1 << 20)]

type ExitCode = Annotated[int, Meta(ge=-255, le=255)]
type Seconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A value of the store, as JSON."""

    def as_text(self) -> str:
        return declared.to_json(self)

    @classmethod
    def of(cls, text: str, what: str = "it") -> Self:
        """Raises:   UnreadableJson for another form, or another version of it."""
        return declared.read(cls, text.encode(), what=what, max_bytes=MAX_BYTES)


@dataclass(frozen=True, kw_only=True)
class Host(_Entry):
    """What a launcher says of its host."""

    name: Name
    life: Name
    """Differs each time that a launcher starts: a host that comes back is another one."""
    address: Name
    port: Port
    """A free port of this host, for the coordinator of the next generation."""
    devices: Several
    processes: Several
    ready: Count
    """The first generation that the host could be in: it runs no processes of earlier ones."""
    leaving: bool = False
    """It was asked to stop, and takes part in no further generation."""
    done: Count = 0
    """The generation whose processes have all ended here with code 0."""
    left: bool = False
    """Its launcher ends."""
    piece_port: Port = 0
    """Where it serves copies of the state in its memory; 0: nowhere."""
    in_memory: Step = -1
    """The step of the latest copy of which it has a piece; -1 without any."""
    stepped: Count = 0
    """The generation whose first step is done, as its first host tells."""
    count: Count = 0
    """Rises with each rewrite, as a sign of life."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What decides whether a failed run starts again, handed from generation to generation."""

    spent: Count = 0
    """Restarts after failures since the last new checkpoint."""
    saved: Step = -1
    """The latest checkpoint when the generation began."""
    code: ExitCode = 0
    step: Step | None = None
    error: str = ""
    """Of the last failure."""
    rank: Count = 0


@dataclass(frozen=True, kw_only=True)
class Generation(_Entry):
    """The hosts that train together, and how their processes connect."""

    number: Count
    members: Annotated[tuple[Name, ...], Meta(min_length=1)]
    lives: tuple[Name, ...]
    counts: tuple[Several, ...]
    """Processes of each member."""
    coordinator: Name
    """host:port, at the first member's."""
    resumed: bool
    """There was a generation before: it goes on from the latest checkpoint."""
    why: str
    restarts: Restarts = field(default_factory=Restarts)
    lost: tuple[str, ...] = ()
    """Hosts that the generation before has lost."""
    pieces: tuple[str, ...] = ()
    """host:port of each member's server of pieces; empty if the run keeps no copies."""
    spare: tuple[str, ...] = ()
    """Hosts that are ready too, and not members."""
    silent: Seconds = 0.0
    """Seconds without a sign of life after which they were declared lost."""

    def __post_init__(self) -> None:
        if not len(self.members) == len(self.lives) == len(self.counts):
            raise ValueError("members, lives and counts differ in number")
        if len(self.pieces) not in (0, len(self.members)):
            raise ValueError("pieces and members differ in number")

    @property
    def processes(self) -> int:
        return sum(self.counts)

    def first_rank(self, name: str) -> int:
        """Return the rank of a member's first process."""
        return sum(self.counts[: self.members.index(name)])

    def count_of(self, name: str) -> int:
        """Return the number of a member's processes."""
        return self.counts[self.members.index(name)]


@dataclass(frozen=True, kw_only=True)
class Over(_Entry):
    """Why a generation ended."""

    kind: Literal["lost", "failed", "join", "stopped"]
    text: str
    hosts: tuple[str, ...] = ()
    """The lost hosts, or those that join."""
    silent: Seconds = 0.0
    code: ExitCode = 0
    """Of a failure, with step, error and rank, as in `children.Failure`."""
    step: Step | None = None
    error: str = ""
    rank: Count = 0


@dataclass(frozen=True, kw_only=True)
class End(_Entry):
    """The run has ended."""

    code: ExitCode
    text: str


@dataclass(frozen=True, kw_only=True)
class StoreView:
    """The store as one launcher reads it, with the hosts that are alive."""

    hosts: Mapping[str, Host]
    alive: Set[str]
    generations: Mapping[int, Generation]
    overs: Mapping[int, Over]
    ends: Mapping[int, End]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Why an entry is passed over, by key."""

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
        known = {name: host.life for name, host in self.hosts.items() if name in self.alive}
        return [m for m, life in lives if known.get(m) != life]

    def has_stepped(self, generation: Generation) -> bool:
        """Return whether the first step of a generation is done, as its first host says."""
        first = self.hosts.get(generation.members[0])
        return first is not None and first.stepped == generation.number

    def left_by(self, generation: Generation) -> list[str]:
        """Return the members that are absent, or that have given the generation up."""
        gone = self.absent(generation)
        return [
            m for m in generation.members if m in gone or self.hosts[m].ready > generation.number
        ]


def view(texts: Mapping[str, str], alive: Set[str]) -> StoreView:
    """Read the texts of the store. Entries that cannot be read are passed over.

    Args:     alive: names of hosts, from `Liveness`.
    """
    kinds: dict[str, type[_Entry]] = {}
    kinds |= {"host": Host, "generation": Generation, "over": Over, "end": End}
    found: dict[str, dict[str, _Entry]] = {kind: {} for kind in kinds}
    unread: dict[str, str] = {}
    for key, text in texts.items():
        kind, _, name = key.partition("/")
        try:
            if kind not in kinds:
                raise Misshapen("it is no key of this version")
            entry = kinds[kind].of(text)
            if isinstance(entry, Host | Generation) and name != _name(entry):
                raise Misshapen("it is of another name")
            if kind != "host" and not _is_number(name):
                raise Misshapen("it is of no generation")
            found[kind][name] = entry
        except UnreadableJson as error:
            unread[key] = str(error)
    numbered = lambda kind: {int(n): entry for n, entry in found[kind].items()}  # noqa: E731
    return StoreView(
        hosts=found["host"],  # type: ignore[arg-type]
        alive=alive,
        generations=numbered("generation"),  # type: ignore[arg-type]
        overs=numbered("over"),  # type: ignore[arg-type]
        ends=numbered("end"),  # type: ignore[arg-type]
        unread=unread,
    )


def _name(entry: Host | Generation) -> str:
    return entry.name if isinstance(entry, Host) else str(entry.number)


def _is_number(name: str) -> bool:
    return only_digits(name) and len(name) < 19


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides who trains, and for how long."""

    least: int = 1
    most: int = 1
    """Limits on the number of hosts."""
    restarts: int
    """Maximum restarts after failures without a new checkpoint in between."""
    obstacle: Callable[[int], str] = lambda devices: ""
    """Returns why a number of devices cannot train; empty if it can."""


def in_order(hosts: Sequence[Host], before: Generation | None) -> list[Host]:
    """Order hosts: those that trained before keep their order, the others follow by name."""
    places = {m: i for i, m in enumerate(before.members)} if before else {}
    return sorted(hosts, key=lambda h: (places.get(h.name, len(places)), h.name))


def chosen(hosts: Sequence[Host], rules: Rules) -> list[Host] | None:
    """Return the first hosts, as many as can train; None if none can. Args: hosts: in order."""
    for count in range(min(len(hosts), rules.most), rules.least - 1, -1):
        if not rules.obstacle(sum(host.devices for host in hosts[:count])):
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
        restarts=restarts,
        silent=over.silent if over is not None else 0.0,
    )


def after(
    before: Generation, over: Over, lost: Sequence[str], saved: int, limit: int
) -> tuple[Restarts, End | None]:
    """Count a restart. Returns:  the counts, and the end of the run if there is no restart.

    Args:     lost: hosts that the generation has lost. saved: the latest step that is saved. limit:
              on restarts without a new checkpoint.
    """
    past = before.restarts
    spent = 0 if saved > past.saved else past.spent
    if over.kind == "stopped" and not over.hosts:
        text = f"generation {before.number} has stopped" if over.text else ""
        return past, End(code=exit_codes.EXIT_PREEMPTED, text=text)
    if over.kind != "failed" or lost:
        return replace(past, spent=spent, saved=saved), None
    failure, previous = (
        Failure(rank=one.rank, code=one.code, step=one.step, error=one.error)
        for one in (over, past)
    )
    final = children.why_final(failure, previous if past.code else None, spent, limit)
    if final:
        return past, End(code=over.code, text=final)
    return Restarts(spent=spent + 1, saved=saved, **asdict(failure)), None


def lost_of(seen: StoreView, before: Generation, over: Over) -> list[str]:
    """Return the hosts that a generation has lost: also those whose loss made another one fail."""
    if over.kind not in ("lost", "failed"):
        return []
    known = over.hosts if over.kind == "lost" else ()
    return [m for m in before.members if m in known or m in seen.absent(before)]


def newcomers(seen: StoreView, generation: Generation, rules: Rules) -> list[str]:
    """Return the hosts that wait, if a generation with them would have more members than now."""
    able = [h for h in seen.there() if h.name in generation.members or h.ready > generation.number]
    better = chosen(in_order(able, generation), rules)
    if better is None or len(better) <= len(generation.members):
        return []
    return [host.name for host in better if host.name not in generation.members]


def lost_text(hosts: Sequence[str], silent: float, by: str) -> str:
    """Describe a loss."""
    names = ", ".join(hosts)
    gone = f"no sign of life for {silent:.1f} s" if silent else "it has started again"
    return f"lost {names}: {gone} (seen by {by})"


def described(generation: Generation, seen: StoreView, rules: Rules) -> str:
    """Describe a generation of several hosts that starts."""
    names, number = ", ".join(generation.members), len(generation.members)
    text = f"generation {generation.number}: {generation.why}; {number} of "
    text += f"{rules.least}:{rules.most} hosts train: {names}"
    if generation.processes > 1:
        text += f"; {generation.processes} processes, coordinator {generation.coordinator}"
    if generation.spare:
        named = (*generation.members, *generation.spare)
        both = [seen.hosts[name] for name in named if name in seen.hosts]
        why = rules.obstacle(sum(host.devices for host in both))
        why = "the most are training" if number == rules.most else f"with more, {why}"
        text += f"; spare: {', '.join(generation.spare)} ({why})"
    return text
