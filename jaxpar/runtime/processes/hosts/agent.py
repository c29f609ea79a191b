"""The launcher of one of several hosts: it forms generations with the others, and trains in them.

Each turn reads the store and does the one thing that is due. While processes train here, it watches
them and the other members; between generations, it waits until enough hosts are there.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from jaxpar.config import Config
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import POLL_SECONDS, SETTLE_SECONDS
from jaxpar.runtime.processes.hosts import generations, options
from jaxpar.runtime.processes.hosts.copies import Copies
from jaxpar.runtime.processes.hosts.formation import Formation
from jaxpar.runtime.processes.hosts.generations import End, Generation, Over, StoreView
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.progress import Progress
from jaxpar.runtime.processes.hosts.store import START_SECONDS, Service
from jaxpar.runtime.processes.hosts.trainers import Trainers
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.processes.launcher import report
from jaxpar.runtime.signals import tolerate_lost_readers

#: Seconds that a launcher takes to tell the others that it leaves.
FAREWELL_SECONDS = 3.0


class Agent:
    """Trains on this host in one generation after another, until the run ends."""

    def __init__(
        self,
        asked: LaunchOptions,
        args: list[str],
        cfg: Config,
        gpus: list[dict[str, str]],
        membership: Membership,
        copies: Copies | None = None,
    ):
        """
        Args:     args, cfg: of the run. gpus: variables of each process, or none. copies: of the
                  state, in this host's memory.
        """
        self.options, self.args, self.cfg, self.gpus = asked, args, cfg, gpus
        self.run_dir, self.here = Path(cfg.run.dir), membership
        self.least, self.most = options.limits(asked.nodes)
        self.fits: Callable[[int], bool] = options.fits(cfg)
        self.formation = Formation(self)
        self.trainers: Trainers | None = None
        self.coordinator: Service | None = None
        self.progress: Progress | None = None
        self.stopped_by: signal.Signals | None = None
        self.copies = copies
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
                time.sleep(POLL_SECONDS)
            self._farewell()
            return code
        finally:
            self._end_here()

    def turn(self) -> int | None:
        """Do what is due. Returns:  the exit code once the run has ended for this host."""
        if self.stopped_by:
            self.here.say(leaving=True)
        seen = self.here.turn()
        patience = self.options.heartbeat_seconds
        if self.here.view is None:  # the first connection also takes the start of a process
            patience += START_SECONDS
        if self.here.silent() > patience:
            return self._without_store()
        self.here.eager = self.trainers is None
        if seen is None:
            self._look_here()
            return None
        if self._cut:
            self._cut = False
            report(f"the rendezvous {self.options.rendezvous} answers again")
        if (end := self._end(seen)) is not None:
            self._end_here()
            return report(end.text, end.code) if end.text else end.code
        return self._train(seen, self.trainers) if self.trainers else self._wait(seen)

    def _look_here(self) -> None:
        """Notice at once that a process has ended, between two looks at the others."""
        if self.trainers is not None:
            before = len(self.trainers.ended)
            self.trainers.over()
            if len(self.trainers.ended) > before:
                self.here.hurry()

    # ------------------------------------------------------------------------ while it trains

    def _train(self, seen: StoreView, trainers: Trainers) -> int | None:
        """Watch the processes here and the other members of the generation."""
        generation = trainers.generation
        over, number = seen.overs.get(generation.number), generation.number
        done = trainers.over()
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
        if (cause := self._cause(seen, trainers, done)) is not None:
            self.here.create(f"over/{number}", cause.as_text())
        return None

    def _cause(self, seen: StoreView, trainers: Trainers, done: bool) -> Over | None:
        """Return why this generation is over, if this host sees a reason."""
        generation = trainers.generation
        if done and trainers.stopped_well():
            asked = {self.name} if self.stopped_by else set()  # perhaps not in the store yet
            leaving = [h.name for h in seen.hosts.values() if h.leaving or h.name in asked]
            who = f" on {', '.join(leaving)}" if leaving else ""
            return Over(kind="stopped", text=f"asked to stop{who}", hosts=tuple(leaving))
        done_elsewhere = {h.name for h in seen.hosts.values() if h.done >= generation.number}
        if absent := [m for m in seen.left_by(generation) if m not in done_elsewhere]:
            silent = round(max(self.silent(m) for m in absent), 1)
            text = generations.lost_text(absent, silent, self.name)
            return Over(kind="lost", text=text, hosts=tuple(absent), silent=silent)
        if self.here.own.done < generation.number and trainers.failed():
            failure = trainers.failure()
            self._show_end_of_log(trainers, failure.rank)
            return Over(
                kind="failed",
                text=f"on {self.name}, {failure}",
                code=failure.code,
                step=failure.step,
                error=failure.error,
                rank=failure.rank,
            )
        if self.coordinator is not None and self.coordinator.ended() is not None:
            text = f"the coordinator on {self.name} has ended"
            return Over(kind="failed", text=text, code=1, error=text)
        return self._with_newcomers(seen, generation)

    def _with_newcomers(self, seen: StoreView, generation: Generation) -> Over | None:
        """Return that hosts can join, once the generation has taken a step."""
        if not seen.has_stepped(generation):
            return None
        new = generations.newcomers(seen, generation, self.least, self.most, self.fits)
        text = f"{', '.join(new)} can join"
        return Over(kind="join", text=text, hosts=tuple(new)) if new else None

    def silent(self, name: str) -> float:
        """Return the seconds since a host's last sign of life; 0 if it has started again."""
        seconds = self.here.liveness.silent(name, time.monotonic())
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
        self.tell(over.text)
        if over.kind == "lost" or (seen.absent(trainers.generation) and over.kind != "failed"):
            trainers.end_within(0.0)
        elif over.kind == "failed":
            trainers.end_within(SETTLE_SECONDS)
        else:
            trainers.ask_to_stop()
        if not done:
            return
        self._end_here()
        self._offer(trainers.generation.number + 1)
        self.formation.over_since = self.formation.over_since or time.monotonic()

    def _notice_progress(self, seen: StoreView, generation: Generation) -> None:
        """Report the first step of a generation."""
        if self.progress is None:
            return
        first = generation.members[0]
        if first == self.name and (step := self.progress.first_step()) is not None:
            self.here.say(stepped=generation.number)
            report(self.progress.told(generation, step))
            self.progress = None
        elif first != self.name and seen.has_stepped(generation):
            report(self.progress.told(generation, None))
            self.progress = None

    def _show_end_of_log(self, trainers: Trainers, rank: int) -> None:
        log = trainers.log(rank)
        if log is not None and (end := children.tail(log)):
            self.tell(f"end of {log}\n{end}\n---")

    # ------------------------------------------------------------------- between generations

    def _wait(self, seen: StoreView) -> int | None:
        """Join the latest generation if this host is a member; else help to form the next one."""
        latest, own = seen.latest, self.here.own
        if self.stopped_by:
            return report(f"stopped by {self.stopped_by.name}", exit_codes.EXIT_PREEMPTED)
        if latest is not None and latest.number >= own.ready:
            member = dict(zip(latest.members, latest.lives, strict=True)).get(own.name)
            if member == own.life and latest.number not in seen.overs:
                self._start(latest, seen)
                return None
            self.here.say(ready=latest.number + 1)
            if latest.number not in seen.overs:
                self.tell(f"waiting: generation {latest.number} trains without this host")
        return self.formation.turn(seen)

    def _start(self, generation: Generation, seen: StoreView) -> None:
        """Start the processes of this host in a generation."""
        self._told = ""
        report(self.formation.described(generation, seen))
        trainers = Trainers(generation, self.name, self.run_dir, self.options.grace)
        if generation.members[0] == self.name and generation.processes > 1:
            self.coordinator = Service(generation.coordinator, generation.processes)
        self.progress = Progress(self.run_dir, self.formation.over_since)
        self.formation.started(generation)
        known = seen.hosts
        hosts = len({known[m].address if m in known else m for m in generation.members})
        self.trainers = trainers
        copies = self.copies.variables(generation, self.here.own) if self.copies else {}
        trainers.start(self.args, self.gpus, hosts, copies)
        if self.stopped_by:
            trainers.ask_to_stop()

    # --------------------------------------------------------------------------------- the end

    def _end(self, seen: StoreView) -> End | None:
        """Return how the run ended. Ends that were there before this launcher do not count."""
        if self._ignored is None:
            self._ignored = set(seen.ends)
        ends = {number: end for number, end in seen.ends.items() if number not in self._ignored}
        return ends[max(ends)] if ends else None

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
                self._end_here()
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

    def _end_here(self) -> None:
        """End the processes of this host, and the coordinator if it is here."""
        if self.trainers is not None:
            self.trainers.kill()
            self.trainers = None
        if self.coordinator is not None:
            self.coordinator.end()
            self.coordinator = None
        self.progress = None

    def _farewell(self) -> None:
        """Tell the others that this host leaves."""
        self.here.say(leaving=True, left=True)
        count, until = self.here.own.count, time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < until:
            seen = self.here.turn()
            if seen is not None and seen.hosts[self.name].count > count:
                return
            time.sleep(POLL_SECONDS)

    def tell(self, text: str) -> None:
        """Report a text, unless it was the last one."""
        if text != self._told:
            self._told = text
            report(text)

    def stop(self, number: signal.Signals) -> None:
        """Leave the run: the first signal makes it save and stop, the second ends it at once."""
        tolerate_lost_readers()
        hung_up = number == signal.SIGHUP
        if self.stopped_by and hung_up:
            return
        if self.trainers is not None:
            first = signal.SIGHUP if hung_up else signal.SIGTERM
            self.trainers.send(signal.SIGKILL if self.stopped_by else first)
        self.stopped_by = number  # the next turn tells the others
