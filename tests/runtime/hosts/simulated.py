"""Launchers of several hosts in this process, with processes that only say that they run.

Nothing happens but in `until`, turn by turn: by a clock of its own, which no busy machine changes.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.runtime.processes import children, launch_options
from jaxpar.runtime.processes.hosts import agent as agents
from jaxpar.runtime.processes.hosts import membership as memberships
from jaxpar.runtime.processes.hosts.agent import Agent
from jaxpar.runtime.processes.hosts.generations import Rules
from jaxpar.runtime.processes.hosts.kv_store import LocalStore, Service, SharedStore, Store
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.trainers import Program
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.processes.sources import LAUNCHED
from jaxpar.runtime.processes.token import RunToken
from tests.ranks import HANG, free_port

TOKEN = RunToken("a token of sixteen")


class Clock:
    """Stands for the module `time`: it goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ClockAhead:
    """The module `time`, but that many seconds ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.time, self.sleep = time.time, time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Process:
    """Stands for a process: it saves and ends with 75 when it is asked to, unless it is stuck."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        self.command, self.env = command, env
        self.rank = int(env[LAUNCHED[2]])
        self.returncode: int | None = None
        self.stuck, self.received = False, list[str]()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            self.received.append(signal.Signals(number).name)
            if number == signal.SIGKILL:
                self.returncode = -signal.SIGKILL
            elif not self.stuck:
                self.returncode = 75

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)


class NoService:
    """Stands for a `Service` that nobody connects to."""

    def __init__(self, *address: Any):
        pass

    def ended(self) -> None:
        return None

    def end(self) -> None:
        pass


class Hosts:
    """Launchers that share a store and a run's folder."""

    def __init__(self, run_dir: Path, monkeypatch: Any, real: bool = False, **given: Any):
        """Args:     real: with the store in another process, and real time."""
        self.run_dir, self.address = run_dir, f"127.0.0.1:{free_port()}"
        self.options: dict[str, Any] = {"nodes": "1:2"} | given
        self.agents: dict[str, Agent] = {}
        self.codes: dict[str, int] = {}
        self.processes: dict[str, list[Process]] = {}
        self.clock: Any = ClockAhead() if real else Clock()
        self.service: Any = NoService()
        self.texts: dict[str, str] | None = None if real else {}
        monkeypatch.setattr(agents, "Service", NoService)
        if real:
            # A sign of life each 0.4 s: what one writes, the others soon read.
            monkeypatch.setattr(memberships, "SIGNS", 50)
            self.service = Service(self.address)
            assert self.service.wait_until_serving()

    def start(self, name: str, processes: int = 1) -> None:
        """Start a launcher; again, if it was lost."""
        asked = LaunchOptions(rendezvous=self.address, num_processes=processes, **self.options)
        store: Store
        if self.texts is None:
            patience = asked.heartbeat_seconds
            store = SharedStore(self.address, str(self.run_dir), TOKEN, patience)
        else:
            store = LocalStore(self.texts, self.clock)
        own = {"name": name, "address": "127.0.0.1", "devices": 1, "processes": processes}
        least, most = launch_options.limits(asked.nodes) if asked.nodes else (1, 1)
        rules = Rules(least=least, most=most, restarts=asked.restarts)
        started = self.processes[name] = []

        def start(command: Sequence[str], env: Mapping[str, str], log: Path | None) -> Any:
            started.append(Process(command, env))
            if started[-1].rank == 0:
                self._take_a_step()
            return started[-1]

        run = {"run_dir": self.run_dir, "grace": asked.grace, "start": start}
        here = Membership(store, own, asked.heartbeat_seconds, self.clock)
        program = Program(command=["train"], **run)
        self.agents[name] = Agent(asked, rules, program, here, clock=self.clock)

    def _take_a_step(self) -> None:
        event = {"event": "first step", "attempt": 1, "age": 0, "time": 0.0, "step": 7}
        with open(self.run_dir / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")

    def kill(self, name: str) -> None:
        """Lose a host: its launcher and its processes end without a word."""
        self.agents.pop(name).here.close()
        for process in self.processes[name]:
            process.end()

    def turn(self, name: str) -> None:
        """Let one launcher do what is due."""
        agent = self.agents[name]
        if (code := agent.turn()) is not None:
            agent.farewell()
            agent.end_here()
            agent.here.close()
            self.codes[name] = code
            del self.agents[name]

    def until(
        self,
        happened: Callable[[], bool],
        seconds: float = HANG,
        order: random.Random | None = None,
    ) -> None:
        """Let all launchers take turns until something has happened.

        Args:     order: takes them in another order each time, and leaves some out.
        """
        until = self.clock.monotonic() + seconds
        while not happened():
            assert self.clock.monotonic() < until, "it has not happened"
            names = list(self.agents)
            if order is not None:
                order.shuffle(names)
                names = names[: order.randint(0, len(names))]
            for name in names:
                self.turn(name)
            self.clock.sleep(children.POLL_SECONDS)

    def running(self) -> dict[int, Process]:
        """The processes that run, by rank."""
        there = [p for each in self.processes.values() for p in each if p.returncode is None]
        return {p.rank: p for p in sorted(there, key=lambda p: p.rank)}

    def worlds(self) -> list[str]:
        """How many processes there are for those that run, and how they resume, by rank."""
        there = [p for each in self.processes.values() for p in each if p.returncode is None]
        there.sort(key=lambda p: p.rank)
        return [" ".join([p.env[LAUNCHED[1]], *p.command[1:]]) for p in there]

    def end(self, *codes: int) -> None:
        """End the first processes that run, with these codes."""
        for process, code in zip(list(self.running().values()), codes, strict=False):
            process.returncode = code

    def close(self) -> None:
        for name in list(self.agents):
            self.kill(name)
        self.service.end()


def words_of(run_dir: Path, rank: int, **words: Any) -> None:
    """Write the last words of a process."""
    (run_dir / "ranks").mkdir(exist_ok=True)
    (run_dir / "ranks" / f"{rank}.json").write_text(json.dumps(words))


def checkpoint(run_dir: Path, step: int) -> None:
    """Save a step, as far as a launcher looks."""
    os.makedirs(run_dir / "checkpoints" / str(step), exist_ok=True)
