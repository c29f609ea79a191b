"""Launchers of two hosts: what they do when one is lost, fails, is stopped or comes back.

The processes only say that they run. Most launchers share a store in this process and have a clock
of their own; tests of connections have a real store, in another process.
"""

import json
import random
import signal

import pytest

from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes.hosts.generations import End
from jaxpar.runtime.processes.hosts.kv_store import Service, SharedStore
from jaxpar.runtime.processes.hosts.service import PORT_TAKEN
from tests.runtime.hosts.simulated import TOKEN, Hosts, words_of

RESUMED = "--checkpoint.resume auto"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    made: list[Hosts] = []

    def make(**options) -> Hosts:
        made.append(Hosts(tmp_path, monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def started(two: Hosts) -> Hosts:
    """Two hosts that train."""
    two.start("a")
    two.start("b")
    two.until(lambda: two.worlds() == ["2", "2"])
    return two


@pytest.fixture
def two(hosts):
    return started(hosts())


def test_a_host_is_lost_comes_back_and_the_run_ends(hosts, tmp_path, capfd):
    two = started(hosts())
    began = two.clock.now
    two.kill("b")
    two.until(lambda: not two.running())
    assert 5.0 <= two.clock.now - began < 6.5
    two.until(lambda: two.worlds() == [f"1 {RESUMED}"], 1)
    two.start("b")  # another life, which takes the old one's place once a step is done
    two.until(lambda: two.worlds() == [f"2 {RESUMED}"] * 2, 10)
    two.end(0, 0)
    two.until(lambda: len(two.codes) == 2, 3)
    assert two.codes == {"a": exit_codes.EXIT_OK, "b": exit_codes.EXIT_OK}
    said = capfd.readouterr().err
    assert "launch: generation 1: start; 2 of 1:2 hosts train: a, b" in said
    assert "launch: lost b: no sign of life for 5." in said
    assert "; 1 of 1:2 hosts train: a; from the beginning" in said
    assert "launch: b can join" in said
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    formed = [e for e in events if e["event"] == "generation"]
    assert [e["lost"] for e in formed[1:3]] == [["b"], []] and 5 <= formed[1]["silent"] <= 6.5


def test_a_host_that_starts_again_at_once_is_noticed_by_its_life(two, capfd):
    two.kill("b")
    two.start("b")
    two.until(lambda: two.worlds() == [f"2 {RESUMED}"] * 2, 10)
    assert "lost b: it has started again" in capfd.readouterr().err


def test_hosts_that_come_within_join_seconds_are_in_the_first_generation(hosts):
    two = hosts(join_seconds=4.0)
    two.start("a")
    two.until(lambda: two.clock.now > 1003)
    two.start("b")
    two.until(lambda: bool(two.worlds()), 1)
    assert two.worlds() == ["2", "2"]


def test_a_host_that_is_late_is_not_waited_for_any_longer(hosts):
    one = hosts(join_seconds=4.0)
    one.start("a")
    one.until(lambda: one.worlds() == ["1"], 5)
    assert one.clock.now >= 1004


def test_a_failure_restarts_all_and_counts(hosts, capfd):
    two = hosts(restarts=1)
    two.start("a")
    two.start("b")
    for resumed in "2", f"2 {RESUMED}":
        two.until(lambda expected=[resumed] * 2: two.worlds() == expected)
        two.running()[1].returncode = 1
    two.until(lambda: len(two.codes) == 2, 10)
    assert two.codes == {"a": 1, "b": 1}
    said = capfd.readouterr().err
    assert said.count("launch: on b, process 1 ended with code 1: see its output") == 4
    assert "; restart 1 of 1" in said and said.count("no new checkpoint after 1 restarts") == 2


def test_the_failure_of_a_host_that_has_lost_another_counts_as_the_loss(two, capfd):
    two.kill("b")
    two.end(1)
    two.until(lambda: two.worlds() == [f"1 {RESUMED}"], 9)
    said = capfd.readouterr().err
    assert "launch: on a, process 0 ended with code 1: see its output\n" in said
    assert "launch: generation 2: lost b: no sign of life for" in said and "restart 1" not in said


def test_after_a_failure_all_hosts_end_their_processes_as_a_single_one_does(two):
    """A second for their own messages, SIGTERM, and SIGKILL after the grace period."""
    first, second = two.running().values()
    first.stuck, second.returncode = True, 1
    two.until(lambda: first.received == ["SIGTERM"], 3)
    two.until(lambda: first.returncode is not None, 5.5)
    assert first.received == ["SIGTERM", "SIGKILL"]
    two.until(lambda: two.worlds() == [f"2 {RESUMED}"] * 2, 2)


@pytest.mark.parametrize("code", [exit_codes.EXIT_CONFIG, exit_codes.EXIT_NUMERICS])
def test_what_would_fail_again_ends_the_run(code, two, capfd):
    two.end(code)
    two.until(lambda: two.codes == {"a": code, "b": code}, 9)
    assert "it would fail again" in capfd.readouterr().err


def test_what_fails_first_waits_a_second_for_what_explains_it(hosts, tmp_path, capfd):
    two = hosts()
    two.start("a", processes=3)
    two.start("b")
    two.until(lambda: len(two.worlds()) == 4)
    stuck, began = two.running()[2], two.clock.now
    stuck.stuck = True
    two.running()[0].returncode = 1
    two.until(lambda: two.clock.now > began + 0.5)
    words_of(tmp_path, 1, time=two.clock.now, step=3, error="bad config")
    two.running()[1].returncode = exit_codes.EXIT_CONFIG
    said = ""
    while "on a, process 1 ended with code 2 at step 3: bad config" not in said:
        two.until(lambda at=two.clock.now: two.clock.now > at, 1)
        said += capfd.readouterr().err
    assert two.clock.now < began + 0.9 and stuck.returncode is None  # nothing else can explain it
    two.until(lambda: len(two.codes) == 2, 9)
    assert set(two.codes.values()) == {exit_codes.EXIT_CONFIG} and "process 0 ended" not in said


def test_a_host_that_is_asked_to_stop_leaves_and_the_others_go_on(two, capfd):
    two.agents["a"].stop(signal.SIGTERM)
    two.until(lambda: two.codes == {"a": exit_codes.EXIT_PREEMPTED}, 5)
    two.until(lambda: two.worlds() == [f"1 {RESUMED}"], 5)
    two.end(0)
    two.until(lambda: two.codes.get("b") == exit_codes.EXIT_OK, 3)
    said = capfd.readouterr().err
    assert "launch: asked to stop on a\n" in said and "launch: stopped by SIGTERM\n" in said


def test_a_host_that_is_asked_to_stop_as_its_processes_start_counts_as_no_failure(two, capfd):
    for process in two.running().values():
        process.stuck = True
    two.agents["a"].stop(signal.SIGTERM)
    two.running()[0].returncode = -signal.SIGTERM
    two.until(lambda: two.codes == {"a": exit_codes.EXIT_PREEMPTED}, 9)
    two.running()[1].stuck = False
    two.running()[1].returncode = exit_codes.EXIT_PREEMPTED
    two.until(lambda: two.worlds() == [f"1 {RESUMED}"], 9)
    assert "restart 1" not in capfd.readouterr().err


def test_all_that_are_asked_to_stop_leave(two):
    for agent in two.agents.values():
        agent.stop(signal.SIGTERM)
    two.until(lambda: len(two.codes) == 2, 5)
    assert set(two.codes.values()) == {exit_codes.EXIT_PREEMPTED}


def test_too_few_hosts_wait_and_then_end(hosts, capfd):
    one = hosts(nodes="2:3", wait_seconds=100.0)
    one.start("a")
    one.until(lambda: one.codes == {"a": exit_codes.EXIT_ERROR}, 101)
    said = capfd.readouterr().err
    assert "after 100 s, --wait-seconds, there are 1 of at least 2 hosts: a" in said


@pytest.mark.parametrize("seed", range(8))
def test_launchers_agree_in_whatever_order_they_look(seed, hosts, tmp_path):
    """Hosts are lost, come back and fail at random moments. All that train are of one generation,
    and the run ends well in all of them."""
    order, many = random.Random(seed), hosts(nodes="1:3", restarts=1000, join_seconds=1.0)
    names, events = "abc", 12
    for name in names:
        many.start(name)

    def one_world() -> bool:
        """Of those that train on and were not told to end, all know of one another."""
        running = many.running().values()
        places = {p.env["JAXPAR_COORDINATOR"]: p.env["JAXPAR_NUM_PROCESSES"] for p in running}
        (count,) = places.values() if len(places) == 1 else ("0",)
        return len(running) == int(count) == len(many.agents) > 0

    for _ in range(events):
        many.until(one_world, 100, order)
        moment = many.clock.now + order.random() * 3
        many.until(lambda at=moment: many.clock.now > at, 100, order)
        lost = order.choice([*many.agents])
        match order.choice(["lose", "fail", "return"]):
            case "lose" if len(many.agents) > 1:
                many.kill(lost)
            case "fail" if many.running():
                order.choice([*many.running().values()]).returncode = 1
        for name in names:
            if name not in many.agents and order.random() < 0.4:
                many.start(name)
    many.until(one_world, 100, order)
    there = len(many.agents)
    many.end(*[0] * there)
    many.until(lambda: not many.agents, 20, order)
    assert sorted(many.codes.values()) == [0] * there


# ---------------------------------------------------------------- with a store in another process


@pytest.mark.waits
@pytest.mark.slow
def test_hosts_meet_and_are_lost_through_a_service(hosts):
    two = hosts(real=True, heartbeat_seconds=20.0)
    two.start("a")
    two.start("b")
    two.until(lambda: two.worlds() == ["2", "2"])
    two.kill("b")
    here = two.agents["a"].here
    count = here.own.count
    two.until(lambda: here.own.count > count + 2)  # it has seen the last sign of life
    text, when = here.liveness._seen["b"]
    here.liveness._seen["b"] = text, when - 20.0
    two.until(lambda: two.worlds() == [f"1 {RESUMED}"])
    two.end(0)
    two.until(lambda: two.codes == {"a": exit_codes.EXIT_OK})


@pytest.mark.waits
@pytest.mark.slow
def test_without_its_rendezvous_a_host_ends_its_processes_and_gives_up(hosts, capfd):
    one = hosts(real=True, nodes="1", heartbeat_seconds=20.0, wait_seconds=60.0)
    one.start("a")
    one.until(lambda: one.worlds() == ["1"])
    one.service.end()
    one.clock.ahead += 30.0
    one.until(lambda: not one.worlds())
    one.clock.ahead += 60.0
    one.until(lambda: one.codes == {"a": exit_codes.EXIT_ERROR})
    said = capfd.readouterr().err
    assert "; ending the processes here" in said
    assert "has not answered for 60 s, --wait-seconds" in said


@pytest.mark.waits
@pytest.mark.slow
def test_a_rendezvous_that_starts_again_soon_ends_nothing(hosts, capfd):
    two = hosts(real=True, heartbeat_seconds=20.0)
    two.start("a")
    two.start("b")
    two.until(lambda: two.worlds() == ["2", "2"])
    processes = list(two.running().values())
    two.service.end()
    two.service = Service(two.address)
    assert two.service.wait_until_serving()
    counts = {name: agent.here.own.count for name, agent in two.agents.items()}
    for name, agent in two.agents.items():
        two.until(lambda a=agent, c=counts[name]: a.here.own.count > c + 2 and a.here.store.free())
    assert list(two.running().values()) == processes
    two.end(0, 0)
    two.until(lambda: two.codes == {"a": 0, "b": 0})
    assert "lost" not in capfd.readouterr().err


@pytest.mark.waits
@pytest.mark.slow
def test_a_connection_that_is_held_up_makes_no_host_silent(hosts, capfd):
    """As by lost packets: TCP then waits for seconds. The other connection is asked."""
    one = hosts(real=True, heartbeat_seconds=20.0, nodes="1")
    one.start("a")
    one.until(lambda: one.worlds() == ["1"])
    here = one.agents["a"].here
    links = here.store
    one.until(lambda: [each.ready for each in links.links] == [True, True])
    held_up, other = links.links
    count = here.own.count
    held_up.process.send_signal(signal.SIGSTOP)
    one.until(lambda: here.own.count > count + 3)
    assert here.silent() < 20.0
    # What it may still write would be older than what the other one has written since.
    assert held_up not in links.links and other in links.links and held_up.ended()
    one.until(lambda: [each.ready for each in links.links] == [True, True])
    assert one.worlds() == ["1"]
    one.end(0)
    one.until(lambda: one.codes == {"a": 0})
    assert "answer" not in capfd.readouterr().err


@pytest.mark.waits
def test_a_stranger_at_the_rendezvous_ends_nothing(hosts, capfd):
    one = hosts(real=True, nodes="1", heartbeat_seconds=20.0)
    one.start("a")
    one.until(lambda: one.worlds() == ["1"])
    here = one.agents["a"].here
    stranger = SharedStore(one.address, str(one.run_dir), TOKEN, 20.0)
    stranger.signatures.signed = stranger.signatures.verified = dict  # it has no token
    try:
        one.until(lambda: stranger.answer() is None and stranger.free())
        end = End(code=0, text="").as_text()
        stranger.ask({"end/1": end, "host/a": "{", "host/b": "[]"}, {"over/1": "x", "note": ""})
        one.until(lambda: stranger.answer() is not None)
    finally:
        stranger.close()
    count = here.own.count
    here.hurry()
    one.until(lambda: here.own.count > count + 1)
    assert one.worlds() == ["1"] and not one.codes
    one.end(0)
    one.until(lambda: one.codes == {"a": 0})
    warned = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warned) == 5 and all("is not signed with this run's token" in w for w in warned)


@pytest.mark.waits
def test_a_store_has_one_server(hosts):
    one = hosts(real=True, nodes="1")
    again = Service(one.address)
    assert not again.wait_until_serving() and again.ended() == PORT_TAKEN
    assert one.service.ended() is None
