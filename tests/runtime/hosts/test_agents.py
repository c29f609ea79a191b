"""Launchers of two hosts on this one, with a trivial program for training.

Most of them share a store in this process; tests of connections, and slow ones, have a real one.
"""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxpar.config import Config, replace
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes.hosts import agent as agents
from jaxpar.runtime.processes.hosts import membership as memberships
from jaxpar.runtime.processes.hosts import trainers
from jaxpar.runtime.processes.hosts.agent import Agent
from jaxpar.runtime.processes.hosts.generations import End
from jaxpar.runtime.processes.hosts.membership import Membership
from jaxpar.runtime.processes.hosts.service import PORT_TAKEN
from jaxpar.runtime.processes.hosts.store import Read, Service, Store
from jaxpar.runtime.processes.launch_options import LaunchOptions
from jaxpar.runtime.processes.token import token_of
from tests.ranks import alive, free_port, wait_for
from tests.slow import slow

pytestmark = pytest.mark.waits

#: Says which rank it is, takes a step in rank 0, and ends as a file of the run's folder says.
TRAINER = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
run, rank = sys.argv[1], os.environ["JAXPAR_PROCESS_ID"]
world = os.environ["JAXPAR_NUM_PROCESSES"] + " " + " ".join(sys.argv[2:])
open(f"{run}/world-{rank}-{os.getpid()}", "w").write(world)
if rank == "0":
    event = {"event": "first step", "attempt": 1, "age": 0, "time": time.time(), "step": 7}
    open(f"{run}/events.jsonl", "a").write(json.dumps(event) + "\\n")
while True:
    if os.path.exists(f"{run}/code-{rank}"):
        code = int(open(f"{run}/code-{rank}").read())
        if code:
            os.unlink(f"{run}/code-{rank}")
        os._exit(code)
    time.sleep(0.02)
"""


class MemoryStore:
    """Stands for a `Store`: it answers at once from texts of this process."""

    trouble = ""

    def __init__(self, texts: dict[str, str], lock: threading.Lock):
        self._texts, self._lock = texts, lock
        self._read: Read | None = None

    def free(self) -> bool:
        return self._read is None

    def ask(self, own: Mapping[str, str], create: Mapping[str, str]) -> None:
        sent = time.monotonic()
        with self._lock:
            self._texts |= {**create, **self._texts, **own}
            self._read = Read(dict(self._texts), sent)

    def answer(self) -> Read | None:
        read, self._read = self._read, None
        return read

    def close(self) -> None:
        pass


class NoService:
    """Stands for a `Service` that nobody connects to."""

    def __init__(self, *address: Any):
        pass

    def ended(self) -> None:
        return None

    def end(self) -> None:
        pass


class Hosts:
    """Launchers in threads, which share a store and a run's folder."""

    def __init__(self, run_dir: Path, monkeypatch: Any, real: bool = False, **options: Any):
        """Args:     real: with the store in another process."""
        self.run_dir, self.address = run_dir, f"127.0.0.1:{free_port()}"
        self.options: dict[str, Any] = {"heartbeat_seconds": 10.0, "join_seconds": 240.0}
        self.options |= {"nodes": "1:2", "wait_seconds": 240.0} | options
        self.agents: dict[str, Agent] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.codes: dict[str, int] = {}
        monkeypatch.setattr(trainers, "PROGRAM", (sys.executable, "-c", TRAINER, str(run_dir)))
        # A sign of life each 0.2 s: what one writes, the others soon read.
        monkeypatch.setattr(memberships, "SIGNS", 50)
        self.service: Any = NoService()
        if real:
            self.service = Service(self.address)
            assert self.service.wait_until_serving()
            return
        texts, lock = dict[str, str](), threading.Lock()
        monkeypatch.setattr(memberships, "Store", lambda *_: MemoryStore(texts, lock))
        monkeypatch.setattr(agents, "Service", NoService)

    def start(self, name: str) -> None:
        asked = LaunchOptions(rendezvous=self.address, **self.options)
        own = {"name": name, "address": "127.0.0.1", "devices": 1, "processes": 1}
        limit = asked.heartbeat_seconds
        token = token_of(self.run_dir, {})
        membership = Membership(self.address, str(self.run_dir), own, limit, token)
        sizes = {"run.dir": str(self.run_dir), "run.cpu_devices": 1, "model.vocab_size": 512}
        agent = Agent(asked, [], replace(Config(), **sizes), [], membership)

        def run() -> None:
            with contextlib.suppress(Killed):
                self.codes[name] = agent.run()
            membership.close()

        self.agents[name], self.threads[name] = agent, threading.Thread(target=run)
        self.threads[name].start()

    def kill(self, name: str) -> None:
        """End a launcher and its processes as a lost host does, without a word."""

        def die() -> None:
            raise Killed

        self.agents[name].turn = die  # type: ignore[method-assign]
        self.threads[name].join()

    def let_the_limit_pass(self, name: str) -> None:
        """Set back when the other launchers last saw a sign of life of a killed one."""
        for other, agent in self.agents.items():
            if other != name:
                here = agent.here
                wait_for(lambda h=here, c=here.own.count: h.own.count > c + 2)  # saw the last one
                seen = here.liveness._seen
                text, when = seen[name]
                seen[name] = text, when - agent.options.heartbeat_seconds - 1

    def worlds(self) -> list[str]:
        """What the running processes say of their world, by rank."""
        files = sorted(self.run_dir.glob("world-*"))
        return [file.read_text().strip() for file in files if alive(int(file.name.split("-")[2]))]

    def close(self) -> None:
        for name, agent in self.agents.items():
            if self.threads[name].is_alive():
                self.kill(name)
            agent.here.close()
        self.service.end()


class Killed(Exception):
    pass


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    made: list[Hosts] = []

    def make(**options: Any) -> Hosts:
        made.append(Hosts(tmp_path, monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("real", [False, slow(True)])
def test_a_host_is_lost_comes_back_and_the_run_ends(real, hosts, tmp_path, capfd):
    two = hosts(real=real)
    two.start("a")
    two.start("b")
    wait_for(lambda: two.worlds() == ["2", "2"])
    two.kill("b")
    two.let_the_limit_pass("b")
    resumed = "1 --checkpoint.resume auto"
    wait_for(lambda: two.worlds() == [resumed])
    two.start("b")  # another life, which takes the old one's place once a step is done
    resumed = "2 --checkpoint.resume auto"
    wait_for(lambda: two.worlds() == [resumed] * 2)
    for rank in 0, 1:
        (tmp_path / f"code-{rank}").write_text("0")
    wait_for(lambda: len(two.codes) == 2)
    assert two.codes == {"a": exit_codes.EXIT_OK, "b": exit_codes.EXIT_OK}
    said = capfd.readouterr().err
    assert "launch: generation 1: start; 2 of 1:2 hosts train: a, b" in said
    assert "launch: lost b: no sign of life for" in said
    assert "; 1 of 1:2 hosts train: a; from the beginning" in said
    assert "launch: b can join" in said
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    formed = [e for e in events if e["event"] == "generation"]
    assert [e["lost"] for e in formed[1:3]] == [["b"], []] and formed[1]["silent"] >= 10.0


def test_a_failure_restarts_all_and_counts(hosts, tmp_path, capfd):
    two = hosts(restarts=1)
    two.start("a")
    two.start("b")
    for resumed in "2", "2 --checkpoint.resume auto":
        wait_for(lambda expected=[resumed] * 2: two.worlds() == expected)
        (tmp_path / "code-1").write_text("1")
    wait_for(lambda: len(two.codes) == 2)
    assert two.codes == {"a": 1, "b": 1}
    said = capfd.readouterr().err
    assert "on b, process 1 ended with code 1: see its output" in said
    assert "; restart 1 of 1" in said and "no new checkpoint after 1 restarts" in said


@pytest.mark.parametrize(
    "code",
    [exit_codes.EXIT_CONFIG, pytest.param(exit_codes.EXIT_NUMERICS, marks=pytest.mark.slow)],
)
def test_what_would_fail_again_ends_the_run(code, hosts, tmp_path):
    one = hosts(nodes="1")
    one.start("a")
    wait_for(lambda: one.worlds() == ["1"])
    (tmp_path / "code-0").write_text(str(code))
    wait_for(lambda: one.codes == {"a": code})


def test_a_host_that_is_asked_to_stop_leaves_and_the_others_go_on(hosts, tmp_path):
    two = hosts()
    two.start("a")
    two.start("b")
    wait_for(lambda: two.worlds() == ["2", "2"])
    two.agents["a"].stop(signal.SIGTERM)
    wait_for(lambda: two.codes == {"a": exit_codes.EXIT_PREEMPTED})
    wait_for(lambda: two.worlds() == ["1 --checkpoint.resume auto"])
    (tmp_path / "code-0").write_text("0")
    wait_for(lambda: two.codes.get("b") == exit_codes.EXIT_OK)


@pytest.mark.slow
def test_without_its_rendezvous_a_host_ends_its_processes_and_gives_up(hosts, capfd):
    one = hosts(real=True, nodes="1", wait_seconds=12.0)
    one.start("a")
    wait_for(lambda: one.worlds() == ["1"])
    one.service.end()
    wait_for(lambda: not one.worlds())
    wait_for(lambda: one.codes == {"a": exit_codes.EXIT_ERROR})
    assert "has not answered for 12 s, --wait-seconds" in capfd.readouterr().err


@pytest.mark.slow
def test_a_rendezvous_that_starts_again_soon_ends_nothing(hosts, tmp_path, capfd):
    two = hosts(real=True, heartbeat_seconds=20.0)
    two.start("a")
    two.start("b")
    wait_for(lambda: two.worlds() == ["2", "2"])
    two.service.end()
    two.service = Service(two.address)
    assert two.service.wait_until_serving()
    counts = [agent.here.own.count for agent in two.agents.values()]
    for agent, count in zip(two.agents.values(), counts, strict=True):
        wait_for(lambda a=agent, c=count: a.here.own.count > c + 2 and a.here.store.free())
    assert two.worlds() == ["2", "2"] and len(list(tmp_path.glob("world-*"))) == 2
    for rank in 0, 1:
        (tmp_path / f"code-{rank}").write_text("0")
    wait_for(lambda: two.codes == {"a": 0, "b": 0})
    assert "lost" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_connection_that_is_held_up_makes_no_host_silent(hosts, capfd):
    """As by lost packets: TCP then waits for seconds. The other connection is asked."""
    one = hosts(real=True, heartbeat_seconds=20.0, nodes="1")
    one.start("a")
    wait_for(lambda: one.worlds() == ["1"])
    here = one.agents["a"].here
    wait_for(lambda: [each.ready for each in here.store.links] == [True, True])
    held_up, other = here.store.links
    count = here.own.count
    held_up.send_signal(signal.SIGSTOP)
    wait_for(lambda: here.own.count > count + 3)
    assert here.silent() < 20.0
    # What it may still write would be older than what the other one has written since.
    assert held_up not in here.store.links and other in here.store.links and held_up.ended()
    wait_for(lambda: [each.ready for each in here.store.links] == [True, True])
    assert one.worlds() == ["1"]
    (one.run_dir / "code-0").write_text("0")
    wait_for(lambda: one.codes == {"a": 0})
    assert "answer" not in capfd.readouterr().err


def test_a_stranger_at_the_rendezvous_ends_nothing(hosts, capfd):
    one = hosts(real=True, nodes="1")
    one.start("a")
    wait_for(lambda: one.worlds() == ["1"], 60)
    here = one.agents["a"].here
    stranger = Store(one.address, here.store._command[-1], 20.0)
    try:
        wait_for(lambda: stranger.answer() is None and stranger.free(), 60)
        end = End(code=0, text="").as_text()
        stranger.ask({"end/1": end, "host/a": "{", "host/b": "[]"}, {"over/1": "x", "note": ""})
        wait_for(lambda: stranger.answer() is not None, 60)
    finally:
        stranger.close()
    count = here.own.count
    wait_for(lambda: here.own.count > count + 2, 60)
    assert one.worlds() == ["1"] and not one.codes
    (one.run_dir / "code-0").write_text("0")
    wait_for(lambda: one.codes == {"a": 0}, 60)
    warned = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warned) == 5 and all("is not signed with this run's token" in w for w in warned)


def test_too_few_hosts_wait_and_then_end(hosts, capfd):
    one = hosts(nodes="2:3", wait_seconds=1.0)
    one.start("a")
    wait_for(lambda: one.codes == {"a": exit_codes.EXIT_ERROR})
    assert "after 1 s, --wait-seconds, there are 1 of at least 2 hosts: a" in capfd.readouterr().err


def test_a_store_has_one_server(hosts):
    one = hosts(real=True, nodes="1")
    again = Service(one.address)
    assert not again.wait_until_serving() and again.ended() == PORT_TAKEN
    assert one.service.ended() is None
