"""The launcher of a host: it forms generations with those of other hosts, and trains in them.

A run on one host has generations of that host, and a store in the launcher's own process.

Each turn reads the store and does the one thing that is due. While processes train here, it watches
them and the other members; between generations, it waits until enough hosts are there.
"""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import POLL_SECONDS, Clock
from jaxpar.runtime.processes.hosts import generations
from jaxpar.runtime.processes.hosts.generations import (
    End,
    Generation,
    Host,
    Over,
    Restarts,
    Rules,
    StoreView,
    lost_text,
)
from jaxpar.runtime.processes.hosts.kv_store import START_SECONDS, Service
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.trainers import (
    CopiesInMemory,
    HostProgress,
    Program,
    Trainers,
    newest_checkpoint,
)
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.processes.sources import NUM_HOSTS
from jaxpar.runtime.signals import tolerate_lost_readers

#: Seconds that a launcher takes to tell the others that it leaves.
FAREWELL_SECONDS = 3.0

#: Codes of processes that a signal has ended: they have saved, or were starting.
ASKED = {
    exit_codes.EXIT_PREEMPTED,
    *(-number for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)),
}


def report(text: str, code: int = 0) -> int:
    """Print a line of the launcher. Returns:  the code."""
    print(f"launch: {text}", file=sys.stderr, flush=True)
    return code


class Agent:
    """Trains on this host in one generation after another, until the run ends."""

    def __init__(
        self,
        asked: LaunchOptions,
        rules: Rules,
        program: Program,
        membership: Membership,
        copies: CopiesInMemory | None = None,
        clock: Clock = time,
    ):
        """Args:     copies: of the state, in this host's memory."""
        self.options, self.rules, self.program = asked, rules, program
        self.here, self.copies, self.clock = membership, copies, clock
        self.alone = not asked.nodes
        """No other host can join the run."""
        self.trainers: Trainers | None = None
        self.stopped_by: signal.Signals | None = None
        self._coordinator: Service | None = None
        self._progress: HostProgress | None = None
        self._before: Generation | None = None
        """The generation before, as this host knows it."""
        self._over_since: float | None = None
        """When this host knew that it was over."""
        self._short_since: float | None = None
        self._enough_since: float | None = None
        self._ignored: set[int] | None = None
        self._told = ""
        self._cut = False

    @property
    def name(self) -> str:
        return self.here.own.name

    def run(self) -> int:
        """Train until the run ends. Returns:  its exit code."""
        try:
            while (code := self.turn()) is None:
                if not self.here.pending():
                    self.clock.sleep(POLL_SECONDS)
            self.farewell()
            return code
        finally:
            self.end_here()

    def turn(self) -> int | None:
        """Do what is due. Returns:  the exit code once the run has ended for this host."""
        if self.stopped_by:
            self.here.say(leaving=True)
        seen = self.here.turn()
        patience = self.options.heartbeat_seconds
        if self.here.view is None:  # the first connection also takes the start of a process
            patience += START_SECONDS
        if not self.alone and self.here.silent() > patience:
            return self._without_store()
        self.here.eager = self.trainers is None
        if seen is None:
            self._look_here()
            return None
        if self._cut:
            self._cut = False
            report(f"the rendezvous {self.options.rendezvous} answers again")
        if (end := self._end(seen)) is not None:
            self.end_here()
            return report(end.text, end.code) if end.text else end.code
        return self._train(seen, self.trainers) if self.trainers else self._wait(seen)

    def _look_here(self) -> None:
        """Notice at once what processes do, between two looks at the others."""
        if self.trainers is not None:
            before = self.trainers.state()
            self.trainers.look()
            if self.trainers.state() != before:
                self.here.hurry()

    # ------------------------------------------------------------------------ while it trains

    def _train(self, seen: StoreView, trainers: Trainers) -> int | None:
        """Watch the processes here and the other members of the generation."""
        generation = trainers.generation
        over, number = seen.overs.get(generation.number), generation.number
        done = trainers.look()
        if number not in seen.generations:  # the store has started again
            self.here.create(f"generation/{number}", generation.as_text())
        self._notice_progress(seen, generation)
        if done and trainers.all_ended_with(exit_codes.EXIT_OK):
            self.here.say(done=number)
            if self._all_done(seen, generation):
                return None
        if over is not None:
            self._finish(seen, trainers, over, done)
            return None
        if (cause := self._cause(seen, trainers)) is not None:
            self.here.create(f"over/{number}", cause.as_text())
        return None

    def _cause(self, seen: StoreView, trainers: Trainers) -> Over | None:
        """Return why this generation is over, if this host sees a reason."""
        generation = trainers.generation
        if trainers.all_ended_with(exit_codes.EXIT_PREEMPTED):
            return self._stopped(seen, "")
        done_elsewhere = {h.name for h in seen.hosts.values() if h.done >= generation.number}
        if absent := [m for m in seen.left_by(generation) if m not in done_elsewhere]:
            silent = round(max(self._silent(m) for m in absent), 1)
            text = lost_text(absent, silent, self.name)
            return Over(kind="lost", text=text, hosts=tuple(absent), silent=silent)
        if (failure := trainers.failure) is not None:
            if self.stopped_by and ASKED & set(trainers.ended.values()):
                return self._stopped(seen, f"stopped by {self.stopped_by.name}")
            log = trainers.log(failure.rank)
            if log is not None and (end := children.tail(log)):
                self._tell(f"--- end of {log}\n{end}\n---", "")
            text = str(failure) if self.alone else f"on {self.name}, {failure}"
            return Over(kind="failed", text=text, **asdict(failure))
        if self._coordinator is not None and self._coordinator.ended() is not None:
            text = f"the coordinator on {self.name} has ended"
            return Over(kind="failed", text=text, code=exit_codes.EXIT_ERROR, error=text)
        if not seen.has_stepped(generation):
            return None  # a host that joins would end what has not yet begun
        new = generations.newcomers(seen, generation, self.rules)
        text = f"{', '.join(new)} can join"
        return Over(kind="join", text=text, hosts=tuple(new)) if new else None

    def _stopped(self, seen: StoreView, alone: str) -> Over:
        """Return that the processes here have stopped. Args: alone: what a single host tells."""
        asked = {self.name} if self.stopped_by else set()  # perhaps not in the store yet
        leaving = [h.name for h in seen.hosts.values() if h.leaving or h.name in asked]
        who = f" on {', '.join(leaving)}" if leaving else ""
        text = alone if self.alone else f"asked to stop{who}"
        return Over(kind="stopped", text=text, hosts=tuple(leaving))

    def _silent(self, name: str) -> float:
        """Return the seconds since a host's last sign of life; 0 if it has started again."""
        if name == self.name:
            return 0.0
        seconds = self.here.liveness.silent(name, self.clock.monotonic())
        return seconds if seconds > self.options.heartbeat_seconds else 0.0

    def _all_done(self, seen: StoreView, generation: Generation) -> bool:
        """Return whether the processes of all members have ended with 0; if so, end the run."""
        done = {h.name for h in seen.hosts.values() if h.done == generation.number}
        if not set(generation.members) <= done:
            return False
        self.here.create(f"end/{generation.number}", End(code=0, text="").as_text())
        return True

    def _finish(self, seen: StoreView, trainers: Trainers, over: Over, done: bool) -> None:
        """End the processes here, since the generation is over; then wait for the next one."""
        self._tell(over.text)
        if over.kind == "failed":
            trainers.end_soon()
        elif over.kind == "lost" or seen.absent(trainers.generation):
            trainers.kill()
            done = True
        else:
            trainers.ask_to_stop()
        if not done:
            return
        self.end_here()
        self._offer(trainers.generation.number + 1)
        self._over_since = self._over_since or self.clock.monotonic()

    def _notice_progress(self, seen: StoreView, generation: Generation) -> None:
        """Report the first step of a generation."""
        if self._progress is None:
            return
        first = generation.members[0]
        if first == self.name and (step := self._progress.first_step()) is not None:
            self.here.say(stepped=generation.number)
            report(self._progress.told(generation, step))
            self._progress = None
        elif first != self.name and seen.has_stepped(generation):
            report(self._progress.told(generation, None))
            self._progress = None

    # ------------------------------------------------------------------- between generations

    def _wait(self, seen: StoreView) -> int | None:
        """Join the latest generation if this host is a member; else help to form the next one."""
        latest, own = seen.latest, self.here.own
        if self.stopped_by:
            return self._leave(seen.over, self.stopped_by.name)
        if latest is None or latest.number < own.ready:
            return self._form(seen)
        member = dict(zip(latest.members, latest.lives, strict=True)).get(own.name)
        if member == own.life and latest.number not in seen.overs:
            self._start(latest, seen)
            return None
        self.here.say(ready=latest.number + 1)
        if latest.number not in seen.overs:
            self._tell(f"waiting: generation {latest.number} trains without this host")
        return self._form(seen)

    def _leave(self, over: Over | None, by: str) -> int:
        """Report that this host was asked to stop. Returns:  the exit code."""
        if self.alone and over is not None:
            failed = f"stopped by {by}, but failed"
            stopped = over.kind == "stopped"  # which has been told
            return exit_codes.EXIT_PREEMPTED if stopped else report(failed, over.code)
        return report(f"stopped by {by}", exit_codes.EXIT_PREEMPTED)

    def _form(self, seen: StoreView) -> int | None:
        """Form the next generation if it is time, and up to this host.

        Returns:  the exit code if this host gives up.
        """
        latest, now = seen.latest, self.clock.monotonic()
        if latest is not None and latest.number not in seen.overs:
            self._declare_lost(seen, latest)
            return None
        there, before = seen.there(), latest or self._before
        number = max([latest.number + 1 if latest else 1, *(host.ready for host in there)])
        self.here.say(ready=number)  # it runs nothing
        ready = [host for host in there if host.ready == number]
        members = generations.chosen(generations.in_order(ready, before), self.rules)
        if members is None:
            return self._short(seen, ready, now)
        self._short_since, self._enough_since = None, self._enough_since or now
        unsure = len(ready) < len(there) or self.here.liveness.unknown(now)
        more = before is None and len(ready) < self.rules.most
        if unsure or (more and now - self._enough_since < self.options.join_seconds):
            return None
        if members[0].name == self.name:
            self._propose(number, members, ready, before, seen)
        return None

    def _declare_lost(self, seen: StoreView, latest: Generation) -> None:
        """Declare a generation over whose members are all gone: none of them will."""
        if self.here.liveness.unknown(self.clock.monotonic()):
            return
        gone = seen.absent(latest)
        if len(gone) == len(latest.members):
            lost = Over(kind="lost", text=lost_text(gone, 0.0, self.name), hosts=tuple(gone))
            self.here.create(f"over/{latest.number}", lost.as_text())

    def _short(self, seen: StoreView, ready: Sequence[Host], now: float) -> int | None:
        """Wait for hosts. Returns:  the exit code once this has taken too long."""
        self._short_since, self._enough_since = self._short_since or now, None
        names = ", ".join(host.name for host in ready)
        need = f"{len(ready)} of at least {self.rules.least} hosts: {names}"
        if len(ready) >= self.rules.least:
            devices = sum(host.devices for host in ready)
            why = self.rules.obstacle(devices)
            need = f"{names}, whose {devices} devices cannot train, nor those of fewer: {why}"
        limit = self.options.wait_seconds
        if now - self._short_since < limit:
            self._tell(f"waiting up to {limit:g} s for more hosts; {need}")
            return None
        stopped = seen.over is not None and seen.over.kind == "stopped"
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
            saved, limit = self._newest(ready), self.rules.restarts
            restarts, final = generations.after(before, over, lost, saved, limit)
            if final is not None:
                self.here.create(f"end/{before.number}", final.as_text())
                return
        formed = generations.next_generation(number, members, before, over, restarts)
        names = {host.name for host in members}
        spare = tuple(host.name for host in ready if host.name not in names)
        formed = replace(formed, lost=tuple(lost), spare=spare)
        if over is not None and over.kind == "failed" and lost:
            silent = round(max(map(self._silent, lost)), 1)
            why = f"{lost_text(lost, silent, self.name)}; {over.text}"
            formed = replace(formed, silent=silent, why=why)
        self.here.create(f"generation/{number}", formed.as_text())

    def _newest(self, hosts: Sequence[Host]) -> int:
        """Return the latest step that is saved, on the disk or in the memory of these hosts."""
        in_memory = max((host.in_memory for host in hosts), default=-1)
        return max(newest_checkpoint(self.program.run_dir), in_memory)

    def _start(self, generation: Generation, seen: StoreView) -> None:
        """Start the processes of this host in a generation."""
        self._told = ""
        own, known = self.here.own, seen.hosts
        if text := self._described(generation, seen):
            report(text)
        variables = {}
        if self.copies is not None:
            variables = self.copies.variables(generation.pieces, generation.members.index(own.name))
        if not self.alone:
            addresses = {known[m].address if m in known else m for m in generation.members}
            variables[NUM_HOSTS] = str(len(addresses))
            if generation.members[0] == own.name and generation.processes > 1:
                self._coordinator = Service(generation.coordinator, generation.processes)
            self._progress = HostProgress(self.program.run_dir, self._over_since, self.clock)
        self._before, self._over_since = generation, None
        self._short_since = self._enough_since = None
        self.trainers = Trainers(self.program, generation, own.name, self.clock)
        self.trainers.start(variables)
        if self.stopped_by:
            self.trainers.ask_to_stop()

    def _described(self, generation: Generation, seen: StoreView) -> str:
        """Describe a generation that starts; empty for the first one of a single host."""
        text = "" if self.alone else generations.described(generation, seen, self.rules)
        if not generation.resumed:
            return text
        saved = self._newest([])
        copy = self._newest([seen.hosts[name] for name in generation.members if name in seen.hosts])
        where = f"from checkpoint {saved}" if saved >= 0 else "from the beginning"
        where = f"from step {copy}, in memory" if copy > saved else where
        spent, limit = generation.restarts.spent, self.rules.restarts
        if self.alone:
            return f"restarting {where}, restart {spent} of {limit}"
        return f"{text}; {where}" + (f"; restart {spent} of {limit}" if spent else "")

    # --------------------------------------------------------------------------------- the end

    def _end(self, seen: StoreView) -> End | None:
        """Return how the run ended. Ends that were there before this launcher do not count."""
        if self._ignored is None:
            self._ignored = set(seen.ends)
        new = seen.ends.keys() - self._ignored
        if not new:
            return None
        if (over := seen.overs.get(max(new))) is not None:
            self._tell(over.text)
        return seen.ends[max(new)]

    def _without_store(self) -> int | None:
        """End the processes, since others may be training without this host by now."""
        limit, silent = self.options.wait_seconds, self.here.silent()
        where = f"the rendezvous {self.options.rendezvous} has not answered for"
        if not self._cut:
            self._cut = True
            why = self.here.store.trouble or "no answer"
            ended = "; ending the processes here" if self.trainers else ""
            report(f"{where} {silent:.1f} s ({why}){ended}")
            if self.trainers is not None:
                number = self.trainers.generation.number
                self.end_here()
                self._offer(number + 1)
        if self.stopped_by:
            return report(f"stopped by {self.stopped_by.name}", exit_codes.EXIT_PREEMPTED)
        if silent > limit:
            why = self.here.store.trouble
            return report(f"{where} {limit:g} s, --wait-seconds: {why}", exit_codes.EXIT_ERROR)
        return None

    def _offer(self, number: int) -> None:
        """Offer to be in a generation, with what this host has for it."""
        in_memory = self.copies.newest_step() if self.copies else -1
        self.here.say(ready=number, in_memory=in_memory)
        self.here.new_port()

    def end_here(self) -> None:
        """End the processes of this host, and the coordinator if it is here."""
        if self.trainers is not None:
            self.trainers.kill()
            self.trainers = None
        if self._coordinator is not None:
            self._coordinator.end()
            self._coordinator = None
        self._progress = None

    def farewell(self) -> None:
        """Tell the others that this host leaves."""
        self.here.say(leaving=True, left=True)
        count, until = self.here.own.count, self.clock.monotonic() + FAREWELL_SECONDS
        while self.clock.monotonic() < until:
            seen = self.here.turn()
            if seen is not None and seen.hosts[self.name].count > count:
                return
            self.clock.sleep(POLL_SECONDS)

    def _tell(self, text: str, prefix: str = "launch: ") -> None:
        """Print a text, unless it was the last one."""
        if text and text != self._told:
            self._told = text
            print(f"{prefix}{text}", file=sys.stderr, flush=True)

    def stop(self, number: signal.Signals) -> None:
        """Leave the run: the first signal makes it save and stop, the second ends it at once.

        SIGHUP is passed on as it is, since process 0 writes to the same terminal. It never ends a
        run at once: when a terminal closes, it may come twice.
        """
        tolerate_lost_readers()
        hung_up = number == signal.SIGHUP
        if self.stopped_by and hung_up:
            return
        if self.trainers is not None:
            first = signal.SIGHUP if hung_up else signal.SIGTERM
            self.trainers.send(signal.SIGKILL if self.stopped_by else first)
        self.stopped_by = number  # the next turn tells the others
