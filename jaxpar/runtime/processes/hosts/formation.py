"""Forms the next generation, between two generations or at the start."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import Failure
from jaxpar.runtime.processes.hosts import generations, options
from jaxpar.runtime.processes.hosts.generations import (
    End,
    Generation,
    Host,
    Over,
    Restarts,
    StoreView,
)
from jaxpar.runtime.processes.launcher import newest_checkpoint, report

if TYPE_CHECKING:
    from jaxpar.runtime.processes.hosts.agent import Agent


class Formation:
    """What one launcher knows while no generation trains."""

    def __init__(self, agent: "Agent"):
        self._agent = agent
        self.before: Generation | None = None
        """The generation before, as this host knows it."""
        self.over_since: float | None = None
        """When this host knew that it was over."""
        self._short_since: float | None = None
        self._enough_since: float | None = None

    def started(self, generation: Generation) -> None:
        """Note that this host is in a generation."""
        self.before, self.over_since = generation, None
        self._short_since = self._enough_since = None

    def turn(self, seen: StoreView) -> int | None:
        """Form the next generation if it is time, and up to this host.

        Returns:  the exit code if this host gives up.
        """
        latest, agent, now = seen.latest, self._agent, time.monotonic()
        if latest is not None and latest.number not in seen.overs:
            self._declare_lost(seen, latest)
            return None
        there, before = seen.there(), latest or self.before
        number = max([latest.number + 1 if latest else 1, *(host.ready for host in there)])
        agent.here.say(ready=number)  # it runs nothing
        ready = [host for host in there if host.ready == number]
        members = generations.chosen(
            generations.in_order(ready, before), agent.least, agent.most, agent.fits
        )
        if members is None:
            return self._short(seen, ready, now)
        self._short_since, self._enough_since = None, self._enough_since or now
        unsure = len(ready) < len(there) or agent.here.liveness.unknown(now)
        more = before is None and len(ready) < agent.most
        if unsure or (more and now - self._enough_since < agent.options.join_seconds):
            return None
        if members[0].name == agent.name:
            self._propose(number, members, ready, before, seen)
        return None

    def _declare_lost(self, seen: StoreView, latest: Generation) -> None:
        """Declare a generation over whose members are all gone: none of them will."""
        agent = self._agent
        if agent.here.liveness.unknown(time.monotonic()):
            return
        gone = seen.absent(latest)
        if len(gone) == len(latest.members):
            text = generations.lost_text(gone, 0.0, agent.name)
            lost = Over(kind="lost", text=text, hosts=tuple(gone))
            agent.here.create(f"over/{latest.number}", lost.as_text())

    def _short(self, seen: StoreView, ready: Sequence[Host], now: float) -> int | None:
        """Wait for hosts. Returns:  the exit code once this has taken too long."""
        agent = self._agent
        self._short_since, self._enough_since = self._short_since or now, None
        names = ", ".join(host.name for host in ready)
        need = f"{len(ready)} of at least {agent.least} hosts: {names}"
        if len(ready) >= agent.least:
            devices = sum(host.devices for host in ready)
            why = options.obstacle(agent.cfg, devices)
            need = f"{names}, whose {devices} devices cannot train, nor those of fewer: {why}"
        limit = agent.options.wait_seconds
        if now - self._short_since < limit:
            agent.tell(f"waiting up to {limit:g} s for more hosts; {need}")
            return None
        over = seen.over
        stopped = over is not None and over.kind == "stopped"
        code = exit_codes.EXIT_PREEMPTED if stopped else exit_codes.EXIT_ERROR
        return report(f"after {limit:g} s, --wait-seconds, there are {need}", code)

    def _propose(
        self,
        number: int,
        members: Sequence[Host],
        ready: Sequence[Host],
        before: Generation | None,
        seen: StoreView,
    ) -> None:
        """Write the next generation, or the end of the run if it does not go on."""
        over = seen.overs.get(before.number) if before is not None else None
        restarts, lost = Restarts(saved=self._newest(ready)), []
        if before is not None and over is not None:
            lost = generations.lost_of(seen, before, over)
            restarts, final = self._after(before, over, lost, self._newest(ready))
            if final is not None:
                self._agent.here.create(f"end/{before.number}", final.as_text())
                return
        formed = generations.next_generation(number, members, before, over, restarts)
        names = {host.name for host in members}
        spare = tuple(host.name for host in ready if host.name not in names)
        formed = replace(formed, lost=tuple(lost), spare=spare)
        if over is not None and over.kind == "failed" and lost:
            silent = round(max(map(self._agent.silent, lost)), 1)
            why = f"{generations.lost_text(lost, silent, self._agent.name)}; {over.text}"
            formed = replace(formed, silent=silent, why=why)
        self._agent.here.create(f"generation/{number}", formed.as_text())

    def _after(
        self, before: Generation, over: Over, lost: Sequence[str], saved: int
    ) -> tuple[Restarts, End | None]:
        """Count a restart. Returns:  the counts, and the end of the run if there is no restart."""
        past = before.restarts
        spent = 0 if saved > past.saved else past.spent
        if over.kind == "stopped" and not over.hosts:
            text = f"generation {before.number} has stopped"
            return past, End(code=exit_codes.EXIT_PREEMPTED, text=text)
        if over.kind != "failed" or lost:
            return replace(past, spent=spent, saved=saved), None
        told: dict[str, Any] = {"rank": over.rank, "code": over.code}
        told |= {"step": over.step, "error": over.error}
        previous = Failure(rank=past.rank, code=past.code, step=past.step, error=past.error)
        failure = Failure(**told)
        limit = self._agent.options.restarts
        final = children.why_final(failure, previous if past.code else None, spent, limit)
        if final:
            return past, End(code=over.code, text=f"{over.text}; {final}")
        return Restarts(spent=spent + 1, saved=saved, **told), None

    def _newest(self, hosts: Sequence[Host]) -> int:
        """Return the latest step that is saved, on the disk or in the memory of these hosts."""
        in_memory = max((host.in_memory for host in hosts), default=-1)
        return max(newest_checkpoint(self._agent.run_dir), in_memory)

    def described(self, generation: Generation, seen: StoreView) -> str:
        """Describe a generation that starts."""
        agent = self._agent
        names, number = ", ".join(generation.members), len(generation.members)
        text = f"generation {generation.number}: {generation.why}; {number} of "
        text += f"{agent.least}:{agent.most} hosts train: {names}"
        if generation.processes > 1:
            text += f"; {generation.processes} processes, coordinator {generation.coordinator}"
        if generation.spare:
            named = (*generation.members, *generation.spare)
            both = [seen.hosts[name] for name in named if name in seen.hosts]
            why = options.obstacle(agent.cfg, sum(host.devices for host in both))
            why = "the most are training" if number == agent.most else f"with more, {why}"
            text += f"; spare: {', '.join(generation.spare)} ({why})"
        if generation.resumed:
            saved = self._newest([])
            where = f"from checkpoint {saved}" if saved >= 0 else "from the beginning"
            members = [seen.hosts[name] for name in generation.members if name in seen.hosts]
            copy = self._newest(members)
            text += f"; from step {copy}, in memory" if copy > saved else f"; {where}"
            spent = generation.restarts.spent
            text += f"; restart {spent} of {agent.options.restarts}" if spent else ""
        return text
