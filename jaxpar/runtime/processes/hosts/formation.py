"""Which hosts form the next generation, and whether there is one. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.addresses import joined
from jaxpar.runtime.processes.children import Failure
from jaxpar.runtime.processes.hosts.generations import (
    End,
    Generation,
    Host,
    Over,
    Restarts,
    StoreView,
)


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
