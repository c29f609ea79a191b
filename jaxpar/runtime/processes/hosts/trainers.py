"""The training processes of one generation on this host, their copies in memory and their progress.

Copies of the state are made and read by the package `memory_checkpoint`; the program that starts a
launcher passes in its folder and its server. The first step of a generation is seen in
RUN/events.jsonl, reported, and recorded there.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import json_lines
from jaxpar.runtime.files.append import Lines
from jaxpar.runtime.files.lock import create_in
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import Child, Clock, Failure
from jaxpar.runtime.processes.hosts.generations import Generation
from jaxpar.runtime.processes.sources import LAUNCHED
from jaxpar.runtime.processes.token import RunToken


class CopiesInMemory(Protocol):
    """`memory_checkpoint.places.HostMemory`: copies of the state that outlive the processes."""

    def serve(self, address: str, token: RunToken) -> AbstractContextManager[int]:
        """Serve them on an address to those who have the run's token. Yields the port."""

    def variables(self, peers: Sequence[str], host: int) -> dict[str, str]:
        """Return the variables of this host's processes in a generation.

        Args:     peers: host:port of each host's server. host: index of this one.
        """

    def newest_step(self) -> int:
        """Return the step of the latest copy of which this host has a piece; -1 without any."""


#: The file of `jaxpar.monitoring.goodput`, and two of its events.
EVENTS_FILE, FIRST_STEP, GENERATION = "events.jsonl", "first step", "generation"

#: Seconds between two looks at the file.
LOOK_SECONDS = 0.25


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the latest complete checkpoint, by its folder name; -1 if none.

    Also of shards, if hosts share no folder (`jaxpar.stores.shards`).
    """
    places = "checkpoints/*", "shards/*/checkpoints/*"
    names = [p.name for place in places for p in run_dir.glob(place) if p.name.isdigit()]
    return max(map(int, names), default=-1)


class HostProgress:
    """Waits for the first step of a generation that has just started."""

    def __init__(self, run_dir: Path, over_since: float | None, clock: Clock = time):
        """Args:     over_since: when the generation before was known to be over here."""
        self._file, self._looked, self._clock = run_dir / EVENTS_FILE, float("-inf"), clock
        self._over_since, self._began = over_since, clock.monotonic()
        self._at = self._file.stat().st_size if self._file.is_file() else 0

    def first_step(self) -> int | None:
        """Return the first step that the generation has taken, once it has."""
        if self._clock.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = self._clock.monotonic()
        with contextlib.suppress(OSError), open(self._file, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                event = json_lines.parse(line) or {}
                if event.get("event") == FIRST_STEP and isinstance(event.get("step"), int):
                    return int(event["step"])
        return None

    def told(self, generation: Generation, step: int | None) -> str:
        """Describe the first step, and record it if its number is known: on the first host."""
        now = self._clock.monotonic()
        seconds = now - (self._began if self._over_since is None else self._over_since)
        since = "its start" if self._over_since is None else "the last one was over"
        if step is not None:
            self._record(generation, step, seconds)
        which = "the first step" if step is None else f"step {step}"
        text = f"generation {generation.number}: {which} is done, {seconds:.1f} s after {since}"
        if generation.lost and generation.silent:
            total = seconds + generation.silent
            text += f", and {total:.1f} s after the last sign of life of {generation.lost[0]}"
        return text

    def _record(self, generation: Generation, step: int, seconds: float) -> None:
        """Append an event of the generation, of no attempt of a process."""
        told: dict[str, Any] = {
            "event": GENERATION,
            "attempt": 0,
            "age": 0.0,
            "time": self._clock.time(),
        }
        told |= {"generation": generation.number}
        told |= {"hosts": list(generation.members)}
        told |= {"lost": list(generation.lost), "why": generation.why, "step": step}
        told |= {"silent": generation.silent, "seconds": round(seconds, 3)}
        with contextlib.suppress(OSError):
            file = Lines(self._file)
            file.write(json.dumps(told) + "\n")
            file.close()


#: Seconds for the other processes to end by themselves after a failure, with their own messages.
SETTLE_SECONDS = 1.0

#: Seconds for the others to end after one has succeeded: JAX's shutdown barrier takes up to 30 s.
FOLLOW_SECONDS = 60.0

#: The codes of processes that have not failed, and those that are the run's own verdict.
WELL = {exit_codes.EXIT_OK, exit_codes.EXIT_PREEMPTED}
VERDICTS = {exit_codes.EXIT_CONFIG, exit_codes.EXIT_NUMERICS}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a host runs in each generation."""

    command: Sequence[str]
    """Of each process, for the first generation of a run."""
    run_dir: Path
    gpus: Sequence[Mapping[str, str]] = ()
    """Variables that give each process its GPUs; empty without GPUs."""
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL, after a failure of another process."""
    start: Callable[[Sequence[str], Mapping[str, str], Path | None], Child] = children.start
    """Starts a process, with a command, variables and a log."""


class Trainers:
    """The training processes of one generation on this host, by their global ranks.

    Once one has failed, the others get SETTLE_SECONDS to end by themselves, then SIGTERM, and
    SIGKILL after the grace period.
    """

    def __init__(self, program: Program, generation: Generation, name: str, clock: Clock = time):
        """Args:     name: of this host."""
        self.program, self.generation, self._clock = program, generation, clock
        first, count = generation.first_rank(name), generation.count_of(name)
        self.ranks = range(first, first + count)
        self.processes: dict[int, Child] = {}
        self.ended: dict[int, int] = {}
        """Return codes of the processes that ended by themselves, in that order."""
        self.failure: Failure | None = None
        """What caused the failures here, once it is known."""
        self._began, self._asked, self._killed = clock.time(), False, False
        self._last_end = self._ask_at = self._kill_at = float("inf")

    def start(self, variables: Mapping[str, str]) -> None:
        """Start the processes. Args: variables: of all of them."""
        generation, gpus = self.generation, self.program.gpus
        resume = ["--checkpoint.resume", "auto"] if generation.resumed else []
        for local, rank in enumerate(self.ranks):
            place = (generation.coordinator, str(generation.processes), str(rank))
            env = os.environ | dict(zip(LAUNCHED, place, strict=True)) | dict(variables)
            env |= gpus[local] if gpus else {}
            command = [*self.program.command, *resume]
            self.processes[rank] = self.program.start(command, env, self.log(rank))

    def log(self, rank: int) -> Path | None:
        """Return the log file of a process; None for the terminal."""
        if rank == 0:
            return None
        folder = self.program.run_dir / "logs"
        with create_in(self.program.run_dir):
            folder.mkdir(exist_ok=True)
        return folder / f"rank-{rank}.log"

    def look(self) -> bool:
        """Notice which processes have ended, and end the others when it is time.

        Returns:  whether none runs.
        """
        if self._killed:
            return True
        for rank, process in self.processes.items():
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode
                self._last_end = self._clock.monotonic()
        done, now = len(self.ended) == len(self.processes), self._clock.monotonic()
        if self.failed():
            self.end_soon()
            known = done or now >= self._ask_at or VERDICTS & set(self.ended.values())
            if known and self.failure is None:
                words = children.last_words(self.program.run_dir, self._began)
                self.failure = children.failure_of(self.ended, words)
        if not done and now >= self._kill_at:
            self.kill()
            return True
        if not done and now >= self._ask_at:
            self.ask_to_stop()
        return done

    def all_ended_with(self, code: int) -> bool:
        """Return whether all processes have ended by themselves with a code."""
        return len(self.ended) == len(self.processes) and set(self.ended.values()) == {code}

    def failed(self) -> bool:
        """Return whether one has failed, has ended otherwise than the others or long before."""
        codes = set(self.ended.values())
        if len(self.ended) == len(self.processes):
            return bool(codes - WELL) or len(codes) > 1
        late = self._clock.monotonic() - self._last_end > FOLLOW_SECONDS
        return late or bool(codes - WELL)

    def state(self) -> tuple[int, bool, bool]:
        """Return what changes whenever the launcher may have something to do."""
        return len(self.ended), self.failure is not None, self._killed

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all running processes."""
        for process in self.processes.values():
            process.send_signal(number)

    def ask_to_stop(self) -> None:
        """Ask the processes to save and stop, once."""
        if not self._asked:
            self._asked = True
            self.send(signal.SIGTERM)

    def end_soon(self) -> None:
        """End the processes as after a failure of one of them."""
        if self._ask_at == float("inf"):
            self._ask_at = self._clock.monotonic() + SETTLE_SECONDS
            self._kill_at = self._ask_at + self.program.grace

    def kill(self) -> None:
        """Kill all processes, with all that they have started."""
        self._killed = True
        for process in self.processes.values():
            process.end()
