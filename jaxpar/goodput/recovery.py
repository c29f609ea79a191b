"""How a run saves and recovers, and how far it comes in a given time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Saves:
    """Saves to one place: the disk, or the memory of peers."""

    every: int = 0
    """Steps between two of them; 0: never."""
    blocking: float = 0.0
    """Seconds that training waits."""
    seconds: float = 0.0
    """Further seconds until the save is complete, while training continues."""
    load: float = 0.0
    """Seconds to load one."""

    def wait(self, step: float) -> float:
        """Return the seconds that training waits for each save.

        A save that is not complete when the next one is due holds training up.

        Args:     step: seconds of a step.
        """
        return self.blocking + max(0.0, self.seconds - self.every * step)

    def between(self, first: int, last: int) -> int:
        """Return how many saves come after steps first+1 to last."""
        return last // self.every - first // self.every if self.every else 0


@dataclass(frozen=True)
class Policy:
    """A run's times in seconds, and what it does after failures."""

    step: float
    disk: Saves
    memory: Saves = Saves()
    """Each host's part, copied to the other host of a pair."""
    detect: float = 0.0
    """From a failure until all processes have ended."""
    restart: float = 0.0
    """New processes until they load: imports, connecting, checks, compilation."""
    spares: int = 0
    """Hosts that wait to replace others."""
    repair: float = 0.0
    """From the loss of a host until it is back."""
    fewest: int = 0
    """Fewest hosts that go on without the lost ones; 0: the run waits for all."""
    fixed: float = 0.0
    """The part of `step` that is not longer on fewer hosts."""

    def step_on(self, live: int, hosts: int) -> float:
        """Return the seconds of a step on `live` of `hosts` hosts, which share the same batch."""
        return self.fixed + (self.step - self.fixed) * hosts / live


class Attempt:
    """Training without a failure, from a step on."""

    def __init__(self, first: int, step: float, policy: Policy):
        """Args:     step: seconds of a step, which are more on fewer hosts."""
        self.first, self.step = first, step
        self._disk, self._memory = policy.disk, policy.memory
        self._disk_wait, self._memory_wait = policy.disk.wait(step), policy.memory.wait(step)

    def waited(self, last: int) -> tuple[float, float]:
        """Return the seconds spent on saves to disk and memory, up to step `last` with its own."""
        of_disk = self._disk.between(self.first, last) * self._disk_wait
        return of_disk, self._memory.between(self.first, last) * self._memory_wait

    def end_of(self, step: int) -> float:
        """Return the seconds from the start to the end of a step, before the saves after it."""
        of_disk, of_memory = self.waited(max(step - 1, self.first))
        return (step - self.first) * self.step + of_disk + of_memory

    def done(self, seconds: float) -> int:
        """Return the last step that has ended after `seconds`."""
        each = self.step
        each += self._disk_wait / self._disk.every if self._disk.every else 0.0
        each += self._memory_wait / self._memory.every if self._memory.every else 0.0
        last = self.first + int(seconds / each)
        while self.end_of(last + 1) <= seconds:
            last += 1
        while last > self.first and self.end_of(last) > seconds:
            last -= 1
        return last

    def saved(self, seconds: float, done: int) -> tuple[int | None, int | None]:
        """Return the last steps of this attempt whose saves to disk and to memory are complete.

        Args:     done: steps after so many seconds.
        """
        return self._saved(seconds, done, self._disk), self._saved(seconds, done, self._memory)

    def _saved(self, seconds: float, done: int, saves: Saves) -> int | None:
        if not saves.every:
            return None
        last = done // saves.every * saves.every
        while last > self.first:
            if self.complete_at(last, saves) <= seconds:
                return last
            last -= saves.every
        return None

    def complete_at(self, step: int, saves: Saves) -> float:
        """Return when the save after a step is complete. Saves to memory come before the disk."""
        waits = saves.blocking
        if saves is self._disk and self._memory.between(step - 1, step):
            waits += self._memory_wait
        return self.end_of(step) + waits + saves.seconds
