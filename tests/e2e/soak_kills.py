"""Runs whose processes are killed again and again, in every phase, end as one that never was."""

import collections
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from jaxpar.runtime import exit_codes
from tests import ranks
from tests.e2e.soak_matrix import ALWAYS, Place, train

#: What a run of several processes is at, in the order of an attempt; the last two take turns.
PHASES = ("start", "checks and restore", "compilation", "first step", "steps", "save")

#: What process 0 has said when a phase begins.
SAYS = {
    "checks and restore": "cluster    launch: process 0",
    "compilation": ("restored step ", "initialized in "),
    "first step": "compiled in ",
    "steps": "first step done after ",
}

#: The longest that is waited within a phase, in seconds; a save is short.
WITHIN = {"start": 3.0, "steps": 1.5, "save": 0.05}

MAX_SECONDS = 900.0


def phase_of(said: str, run: Path) -> str:
    """What an attempt is at, from what it has said so far and what lies in its folder."""
    found = PHASES[0]
    for phase, words in SAYS.items():
        if any(text in said for text in ((words,) if isinstance(words, str) else words)):
            found = phase
    if found == "steps" and any((run / "checkpoints").glob("*tmp*")):
        return "save"
    return found


class Attempt:
    """One start of a run's processes under a launcher, and what it has said."""

    def __init__(self, launcher: subprocess.Popen, log: Path, run: Path, before: list[int]):
        self._launcher, self._log, self._run = launcher, log, run
        self._begins = log.stat().st_size
        self.pids: list[int] = []
        self._before = before

    def phase(self) -> str:
        """What it is at."""
        with open(self._log, "rb") as file:
            file.seek(self._begins)
            said = file.read().decode("utf-8", "replace")
        return phase_of(said.rpartition("launch: restarting")[2], self._run)

    def is_over(self) -> bool:
        """Whether the launcher has ended, or one of the processes."""
        ended = any(not ranks.alive(pid) for pid in self.pids)
        return ended or self._launcher.poll() is not None

    def started(self, count: int) -> bool:
        """Wait for its processes. Returns whether they have come."""
        while self._launcher.poll() is None:
            pids = [pid for pid in ranks.children_of(self._launcher.pid) if ranks.alive(pid)]
            if len(pids) == count and not set(pids) & set(self._before):
                self.pids = pids
                return True
            time.sleep(0.01)
        return False

    def kill_in(self, wanted: str, rng: random.Random) -> str | None:
        """SIGKILL a random process, in a phase or one after it. Returns the phase; None: over."""
        rank, until = PHASES.index(wanted), time.monotonic() + MAX_SECONDS
        while not self.is_over() and time.monotonic() < until:
            at = self.phase()
            if at == wanted or PHASES.index(at) > rank:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, WITHIN.get(wanted, 0.3)))
        if self.is_over():
            return None
        at = self.phase()
        os.kill(rng.choice(self.pids), signal.SIGKILL)
        return at


class Kills:
    """The trials, and the run that all are compared with."""

    def __init__(self, config: str, most: int):
        """Args:     config: a config file; runs lie beside it. most: kills of one run."""
        self._config, self._folder = config, Path(config).parent
        self._whole = self._folder / "whole"
        self._steps = 60 + 20 * most
        self.phases: dict[int, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def whole(self) -> str:
        """The run in one process that nobody kills."""
        train(self._config, self._whole, Place("data", 1), *self._flags())
        return f"{self._steps} steps"

    def _flags(self) -> tuple[str, ...]:
        recent = ("--guard.recent-steps", str(self._steps))
        return ("--train.num-steps", str(self._steps), "--checkpoint.every", "3", *recent)

    def killed(self, count: int, kills: int, number: int) -> str:
        """A run of so many processes, killed so many times. Returns the phases, counted."""
        run = self._folder / f"run {count} {number}"
        log, rng = run.with_suffix(".log"), random.Random(100 * count + number)
        args = ("--restarts", str(kills + 1), "--", self._config, "--parallel.data", "4")
        phases: collections.Counter[str] = collections.Counter()
        with open(log, "w") as out:
            flags = ("--run.dir", str(run), *ALWAYS, *self._flags())
            process = ranks.launch(count, 4 // count, *args, *flags, out=out)
        attempt = Attempt(process, log, run, [])
        while phases.total() < kills and attempt.started(count):
            at = attempt.kill_in(rng.choice(PHASES), rng)
            if at is not None:
                phases[at] += 1
            ranks.wait_for(attempt.is_over, MAX_SECONDS)
            attempt = Attempt(process, log, run, attempt.pids)
        code, _ = ranks.finish(process, MAX_SECONDS)
        said = log.read_text("utf-8", errors="replace")
        assert code == exit_codes.EXIT_OK, f"code {code}: {said[-1500:]}"
        assert said.count("killed by SIGKILL") == kills == phases.total(), dict(phases)
        ranks.assert_same_records(run, self._whole)
        self.phases[count] += phases
        return ", ".join(f"{phase} {phases[phase]}" for phase in PHASES)
