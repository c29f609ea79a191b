"""The training processes of one generation on this host."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxpar.runtime import exit_codes
from jaxpar.runtime.files.run_lock import create_in
from jaxpar.runtime.processes import children
from jaxpar.runtime.processes.children import Children, Failure
from jaxpar.runtime.processes.detect import LAUNCHED, NUM_HOSTS
from jaxpar.runtime.processes.hosts.generations import Generation

#: The program of a training process.
PROGRAM = (sys.executable, "-u", "-m", "jaxpar.train")


class Trainers(Children):
    """The training processes of one generation on this host, with their global ranks."""

    def __init__(self, generation: Generation, name: str, run_dir: Path, grace: float):
        """Args:     name: of this host."""
        super().__init__([], grace)
        self.generation, self.name, self.run_dir = generation, name, run_dir
        self.first_rank = generation.first_rank(name)
        self.began, self._asked, self._kill_at = time.time(), False, float("inf")

    def start(
        self,
        args: Sequence[str],
        gpus: Sequence[Mapping[str, str]],
        hosts: int,
        more: Mapping[str, str],
    ) -> None:
        """Start the processes.

        Args:     args: of `jaxpar.train`. gpus: variables of each process, or none. hosts: with
                  addresses of their own. more: variables of all processes.
        """
        generation, count = self.generation, self.generation.processes
        resume = ["--checkpoint.resume", "auto"] if generation.resumed else []
        command = [*PROGRAM, *args, *resume]
        for local in range(generation.counts[generation.members.index(self.name)]):
            rank = self.first_rank + local
            place = (generation.coordinator, str(count), str(rank))
            env = os.environ | dict(zip(LAUNCHED, place, strict=True)) | {NUM_HOSTS: str(hosts)}
            env |= dict(more) | dict(gpus[local] if gpus else {})
            self.processes.append(children.start(command, env, self.log(rank)))

    def log(self, rank: int) -> Path | None:
        """Return the log file of a process; None for the terminal."""
        if rank == 0:
            return None
        folder = self.run_dir / "logs"
        with create_in(self.run_dir):
            folder.mkdir(exist_ok=True)
        return folder / f"rank-{rank}.log"

    def all_ended_with(self, code: int) -> bool:
        """Return whether all processes have ended by themselves with a code."""
        return len(self.ended) == len(self.processes) and set(self.ended.values()) == {code}

    def failure(self) -> Failure:
        """Return the failure of this host that caused the others here, by global rank."""
        words = children.last_words(self.run_dir, self.began)
        ended = {self.first_rank + local: code for local, code in self.ended.items()}
        return children.failure_of(ended, words)

    def ask_to_stop(self) -> None:
        """Ask the processes to save and stop, once."""
        if not self._asked:
            self._asked = True
            self.send(signal.SIGTERM)

    def end_within(self, seconds: float) -> None:
        """Kill the processes if they have not ended by then."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def over(self) -> bool:
        """Return whether no process runs. Kills them once the time has come."""
        done = self.look()
        if not done and time.monotonic() > self._kill_at:
            self.kill()
            return True
        return done

    def stopped_well(self) -> bool:
        """Return whether all processes have saved and stopped."""
        return self.all_ended_with(exit_codes.EXIT_PREEMPTED)
