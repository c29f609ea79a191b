"""The simulation of one run: training, failures, recoveries, repairs."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxpar.goodput.failures import LOSES_HOST, Interruption
from jaxpar.goodput.recovery import Attempt, Policy

#: Where the time of a run goes. Only "step" counts as goodput: steps that were not repeated, in the
#: time that all hosts would take for them.
PARTS = (
    *("step", "fewer hosts", "lost work", "save wait", "mirror wait"),
    *("detect", "restart", "load", "no hosts"),
)


@dataclass
class Outcome:
    """What became of a simulated run."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """By kind."""
    loaded: Counter[str] = field(default_factory=Counter)
    """Restarts by where the state came from: memory, disk, or start."""
    most_lost: int = 0
    """Most steps that one recovery lost."""

    @property
    def total(self) -> float:
        """The simulated seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count."""
        return self.seconds["step"] / self.total if self.total else 0.0


class Simulation:
    """A run on `hosts` hosts."""

    def __init__(
        self, policy: Policy, hosts: int, failures: Iterator[Interruption], seconds: float
    ):
        """Args:     failures: from `failures.failures`. seconds: after which the run is over."""
        self.policy, self.hosts, self.end = policy, hosts, seconds
        self.now, self.outcome = 0.0, Outcome()
        self._failures = failures
        self._next = next(failures, None)
        self._live, self._spares = set(range(hosts)), policy.spares
        self._repairs: list[float] = []
        self._on_disk, self._in_memory = 0, -1  # steps; the run can always start over
        self._without: set[int] = set()  # hosts that have lost what they held since that mirror
        self._taken: list[tuple[int, int, float]] = []  # steps that count: first, last, seconds

    def run(self) -> Outcome:
        """Simulate the run to its end."""
        first = 0
        while self.now < self.end:
            first = self._train(first)
        self.outcome.steps = first
        for begins, ends, seconds in self._taken:
            useful = (ends - begins) * self.policy.step
            self.outcome.seconds["step"] += useful
            self.outcome.seconds["fewer hosts"] += (ends - begins) * seconds - useful
        return self.outcome

    # ------------------------------------------------------------------------------- training

    def _train(self, first: int) -> int:
        """Train from a step until something happens. Returns the step that training resumes from,
        at the end the last one."""
        live = len(self._live)
        attempt = Attempt(first, self.policy.step_on(live, self.hosts), self.policy)
        began, growing = self.now, self._repairs and live < self.hosts
        # A host that came back during the start is taken in after a step.
        until = min(max(self._repairs[0], began), self.end) if growing else self.end
        failure = self._next_failure(until)
        self.now = failure.time if failure else until
        if self.now >= self.end:
            return self._account(attempt, self.end - began)
        if failure is None:
            return self._stopped_in_time(attempt, began)
        self._pop()
        if failure.kind == "planned":
            return self._stopped_in_time(attempt, began)
        done = self._account(attempt, self.now - began)
        self._keep_saves(attempt, self.now - began, done)
        self._lose(failure)
        return self._recover(done)

    def _account(self, attempt: Attempt, seconds: float) -> int:
        """Count the time of an attempt. Returns its last step."""
        done = attempt.done(seconds)
        disk, memory = attempt.waited(done)
        spare = max(seconds - (done - attempt.first) * attempt.step, 0.0)
        memory = min(memory, spare)  # it may have ended within the last save
        disk = min(disk, spare - memory)
        self.outcome.seconds["save wait"] += disk
        self.outcome.seconds["mirror wait"] += memory
        self.outcome.seconds["lost work"] += spare - disk - memory  # within a step
        self._taken.append((attempt.first, done, attempt.step))
        return done

    def _keep_saves(self, attempt: Attempt, seconds: float, done: int) -> None:
        """Note the saves of an attempt that are complete."""
        on_disk, mirrored = attempt.saved(seconds, done)
        self._on_disk = on_disk or self._on_disk
        if mirrored is not None:
            self._in_memory = mirrored
            self._without.clear()

    def _stopped_in_time(self, attempt: Attempt, began: float) -> int:
        """End the current step, save it to disk, and start again, with the hosts that have been
        repaired."""
        done = attempt.done(self.now - began) + 1
        ends = min(max(began + attempt.end_of(done), self.now), self.end)
        done = self._account(attempt, ends - began)
        self._keep_saves(attempt, ends - began, done)
        self.now = ends
        if not self._pass("save wait", self.policy.disk.blocking + self.policy.disk.seconds):
            return self._recover(done)
        self._on_disk = done
        return self._recover(done, detect=False)

    # ------------------------------------------------------------------------------- recovery

    def _recover(self, done: int, *, detect: bool = True) -> int:
        """Start again after `done` steps, until no failure comes between. Returns the first step
        that is trained."""
        while self.now < self.end:
            if detect and not self._pass("detect", self.policy.detect):
                continue
            detect = True  # a failure of the start is detected, too
            if not self._wait_for_hosts() or not self._pass("restart", self.policy.restart):
                continue
            memory = self._in_memory >= self._on_disk and self._mirrors_are_whole()
            where = "memory" if memory else "disk" if self._on_disk else "start"
            place = self.policy.memory if memory else self.policy.disk
            if where == "start" or self._pass("load", place.load):
                return self._loaded(done, where)
        return done

    def _loaded(self, done: int, where: str) -> int:
        step = self._in_memory if where == "memory" else self._on_disk
        if where != "memory":
            self._in_memory = -1
        self.outcome.loaded[where] += 1
        self.outcome.most_lost = max(self.outcome.most_lost, done - step)
        while self._taken and self._taken[-1][1] > step:
            begins, ends, seconds = self._taken.pop()
            self.outcome.seconds["lost work"] += (ends - max(step, begins)) * seconds
            if begins < step:
                self._taken.append((begins, step, seconds))
        return step

    def _wait_for_hosts(self) -> bool:
        """Take in spare and repaired hosts, and wait until there are enough. Returns whether no
        failure came between."""
        needed = self.policy.fewest or self.hosts
        self._take_in()
        while len(self._live) < needed:
            if not self._until("no hosts", self._repairs[0]):
                return False
            self._take_in()
        return True

    def _take_in(self) -> None:
        while self._repairs and self._repairs[0] <= self.now:
            heapq.heappop(self._repairs)
            self._spares += 1
        if not self._spares or len(self._live) == self.hosts:
            return
        for place in sorted(set(range(self.hosts)) - self._live)[: self._spares]:
            self._live.add(place)
            self._spares -= 1

    def _mirrors_are_whole(self) -> bool:
        """Whether of each pair of hosts one has kept what both held."""
        return self._in_memory >= 0 and not any(host ^ 1 in self._without for host in self._without)

    # ----------------------------------------------------------------------- time and failures

    def _pass(self, part: str, seconds: float) -> bool:
        """Spend seconds on a part of a recovery. Returns as `_until`."""
        return self._until(part, self.now + seconds)

    def _until(self, part: str, moment: float) -> bool:
        """Spend the time up to a moment on a part of a recovery. Returns whether neither a failure
        nor the end came between; a planned stop changes nothing then."""
        until = max(min(moment, self.end), self.now)
        while (failure := self._next_failure(until)) is not None:
            self._pop()
            if failure.kind != "planned":
                came = max(failure.time, self.now)  # it may have come while a step was ended
                self.outcome.seconds[part] += came - self.now
                self.now = came
                self._lose(failure)
                return False
        self.outcome.seconds[part] += until - self.now
        self.now = until
        return self.now < self.end

    def _next_failure(self, before: float) -> Interruption | None:
        """Return the next planned stop, or failure of a host that is there, before a moment."""
        while (one := self._next) is not None and one.time < before:
            if one.kind == "planned" or one.host in self._live:
                return one
            self._next = next(self._failures, None)
        return None

    def _pop(self) -> None:
        assert self._next is not None
        self.outcome.failures[self._next.kind] += 1
        self._next = next(self._failures, None)

    def _lose(self, failure: Interruption) -> None:
        """Take the host of a failure out of the run, if it is lost."""
        if failure.kind in LOSES_HOST:
            self._live.discard(failure.host)
            self._without.add(failure.host)
            heapq.heappush(self._repairs, self.now + self.policy.repair)
