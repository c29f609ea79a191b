"""Which hosts form a generation, with which ranks, and when others count as lost."""

import dataclasses

import pytest

from jaxpar.commands import call, read
from jaxpar.config import Config, ConfigError, replace
from jaxpar.runtime.processes import launch_options
from jaxpar.runtime.processes.hosts import generations
from jaxpar.runtime.processes.hosts.generations import (
    End,
    Generation,
    Host,
    Over,
    Restarts,
    Rules,
    StoreView,
)
from jaxpar.runtime.processes.hosts.membership import Liveness


def host(name: str, **more) -> Host:
    own = {"life": f"life of {name}", "address": f"10.0.0.{ord(name[0])}", "port": 5000}
    return Host(**{"name": name, "devices": 2, "processes": 1, "ready": 1} | own | more)


def generation(names: str, number: int = 1, **more) -> Generation:
    hosts = [host(name) for name in names]
    formed = generations.next_generation(number, hosts, None, None, Restarts())
    return dataclasses.replace(formed, **more)


def seen(
    names: str, alive: str | None = None, latest: Generation | None = None, **overs
) -> StoreView:
    return StoreView(
        hosts={name: host(name) for name in names},
        alive=set(names if alive is None else alive),
        generations={latest.number: latest} if latest else {},
        overs=overs,
        ends={},
    )


def test_members_have_ranks_in_their_order():
    members = [host("b", processes=2), host("a", processes=3), host("c")]
    formed = generations.next_generation(4, members, None, None, Restarts())
    assert formed.members == ("b", "a", "c") and formed.processes == 6
    assert [formed.first_rank(name) for name in "bac"] == [0, 2, 5]
    assert [formed.count_of(name) for name in "bac"] == [2, 3, 1]
    assert formed.coordinator == f"10.0.0.{ord('b')}:5000"
    v6 = generations.next_generation(4, [host("b", address="fd00::1")], None, None, Restarts())
    assert v6.coordinator == "[fd00::1]:5000"


def test_what_the_store_holds_is_read_back():
    over = Over(kind="lost", text="lost b", hosts=("b",), silent=3.2)
    formed = generation("ab", restarts=Restarts(spent=2, error="boom"))
    texts = {
        "host/a": host("a").as_text(),
        "generation/1": formed.as_text(),
        "over/1": over.as_text(),
        "end/1": End(code=17, text="bad").as_text(),
    }
    found = generations.view(texts, {"a"})
    assert found.hosts == {"a": host("a")} and found.latest == formed and found.over == over
    assert found.ends == {1: End(code=17, text="bad")}
    assert found.latest.restarts.spent == 2


UNREADABLE = {
    "host/x": "{",
    "host/deep": "[" * 100_000,
    "host/deeper": '{"name": ' * 100_000,
    "host/a number": "5",
    "host/another name": host("b").as_text(),
    "host/later": host("later").as_text().replace('"version": 1', '"version": 2'),
    "host/ready": host("ready").as_text().replace('"ready": 1', '"ready": "x"'),
    "host/true": host("true").as_text().replace('"ready": 1', '"ready": true'),
    "host/negative": host("negative").as_text().replace('"ready": 1', '"ready": -1'),
    "host/large": host("large").as_text().replace('"ready": 1', f'"ready": {1 << 80}'),
    "host/port": host("port").as_text().replace('"port": 5000', '"port": 65536'),
    "host/NaN": host("NaN").as_text().replace('"ready": 1', '"ready": NaN'),
    "note/x": "hi",
    "host": "hi",
    "": "",
    "generation/x": "{}",
    "generation/2": generation("ab").as_text(),
    "generation/1": generation("ab").as_text().replace('"counts": [1, 1]', '"counts": [1]'),
    "generation/-1": "{}",
    f"over/{'9' * 30}": Over(kind="lost", text="").as_text(),
    "over/1": Over(kind="lost", text="").as_text().replace('"lost"', '"dropped"'),
    "end/1": "[]",
    "end/2": '{"code": 1000, "text": ""}',
}


@pytest.mark.parametrize("key", UNREADABLE)
def test_what_cannot_be_read_is_passed_over(key):
    later = host("a").as_text().replace("{", '{"a_later_field": [1, {}], ', 1)
    found = generations.view({"host/a": later, key: UNREADABLE[key]}, {"a"})
    assert found.hosts == {"a": host("a")} and list(found.unread) == [key]
    assert not found.generations and not found.overs and not found.ends
    assert "\n" not in found.unread[key] and len(found.unread[key]) < 300


def test_those_that_trained_before_keep_their_order():
    before = generation("cab")
    names = [h.name for h in generations.in_order([host(n) for n in "adbc"], before)]
    assert names == ["c", "a", "b", "d"]
    assert [h.name for h in generations.in_order([host("b"), host("a")], None)] == ["a", "b"]


def rules(least: int, most: int, *numbers: int) -> Rules:
    """Args:     numbers: of devices that can train; all without any."""
    obstacle = lambda devices: "" if devices in numbers or not numbers else "it does not divide"  # noqa: E731
    return Rules(least=least, most=most, restarts=3, obstacle=obstacle)


@pytest.mark.parametrize(
    ("there", "of", "expected"),
    [
        ("abcd", rules(2, 4, 2, 4, 8), "abcd"),
        ("abc", rules(2, 4, 2, 4, 8), "ab"),  # 6 devices do not divide the batch
        ("abc", rules(3, 4, 2, 4, 8), None),
        ("abcd", rules(2, 3, 4, 6, 8), "abc"),
        ("a", rules(2, 4, 2, 4, 8), None),
    ],
)
def test_as_many_hosts_train_as_can(there, of, expected):
    chosen = generations.chosen([host(name) for name in there], of)
    assert (chosen and "".join(h.name for h in chosen)) == expected


def test_devices_fit_that_divide_the_global_batch_and_the_model():
    sizes = {"train.global_batch_size": 24, "run.cpu_devices": 1, "model.vocab_size": 512}
    cfg = replace(Config(), **sizes)
    fitting = [n for n in range(1, 9) if not launch_options.obstacle(cfg, n)]
    assert cfg.model.d_model % 3 and fitting == [1, 2, 4, 8]
    assert launch_options.obstacle(cfg, 5).startswith(
        "model.d_model must be divisible by parallel.data"
    )
    assert not launch_options.obstacle(replace(cfg, **{"parallel.auto": ("all",)}), 7)


def test_a_member_that_is_gone_has_started_again_or_gave_up_is_noticed():
    formed = generation("abc")
    assert seen("abc", latest=formed).left_by(formed) == []
    assert seen("abc", "ac", formed).left_by(formed) == ["b"]
    again = seen("abc", latest=formed)
    other = {"b": host("b", life="another"), "c": host("c", ready=2)}
    again = dataclasses.replace(again, hosts={**again.hosts, **other})
    assert again.absent(formed) == ["b"] and again.left_by(formed) == ["b", "c"]


def test_a_loss_explains_the_failure_of_another_member():
    formed = generation("abc")
    failed = Over(kind="failed", text="", code=1)
    assert generations.lost_of(seen("abc", "ac"), formed, failed) == ["b"]
    assert generations.lost_of(seen("abc"), formed, failed) == []
    lost = Over(kind="lost", text="", hosts=("c",))
    assert generations.lost_of(seen("abc", "ac"), formed, lost) == ["b", "c"]
    joins = Over(kind="join", text="", hosts=("d",))
    assert generations.lost_of(seen("abcd", "acd"), formed, joins) == []


def test_hosts_join_only_if_more_would_train():
    formed = generation("ab")
    waiting = lambda names: dataclasses.replace(  # noqa: E731
        seen("ab" + names), hosts={n: host(n, ready=2 if n in names else 1) for n in "ab" + names}
    )
    of = generations.newcomers
    assert of(waiting("c"), formed, rules(1, 4)) == ["c"]
    assert of(waiting("c"), formed, rules(1, 2)) == []  # --nodes 1:2
    assert of(waiting("c"), formed, rules(1, 4, 4, 8)) == []
    assert of(waiting("cd"), formed, rules(1, 4, 4, 8)) == ["c", "d"]
    assert of(waiting(""), formed, rules(1, 4)) == []


def test_a_host_lives_while_its_entry_changes():
    life = Liveness(3.0)
    life.note({"old": "x", "a": "1"}, 0.0)
    assert life.alive(0.0) == set() and life.unknown(1.0) == {"old", "a"}
    life.note({"old": "x", "a": "2", "b": "1"}, 2.0)
    assert life.alive(2.0) == {"a", "b"} and life.unknown(2.0) == {"old"}
    assert life.unknown(3.5) == set()  # long gone
    life.note({"old": "x", "a": "2", "b": "2"}, 5.5)
    assert life.alive(5.5) == {"b"} and life.silent("a", 5.5) == 3.5
    life.forgive(9.0)  # nobody could be seen
    assert life.alive(9.0) == {"a", "b"} and life.silent("c", 9.0) == float("inf")


REFUSED = [
    (["--nodes", "4:2", "--rendezvous", "a:1"], "is not MIN:MAX with 1 <= MIN <= MAX"),
    (["--nodes", "two", "--rendezvous", "a:1"], "is not MIN:MAX"),
    (["--nodes", "2:4"], "--rendezvous = '': is needed with --nodes"),
    (["--rendezvous", "a:1"], "--nodes = '': is not MIN:MAX"),
    (["--nodes", "2", "--rendezvous", "gpu01"], "'gpu01': is not HOST:PORT"),
    (["--nodes", "2", "--rendezvous", "fd00::1:5"], "is not HOST:PORT"),
    (["--nodes", "2", "--rendezvous", "a:1", "--heartbeat-seconds", "0.1"], "at least 0.5"),
    (["--nodes", "2", "--rendezvous", "a:1", "--wait-seconds", "nan"], "at least 1"),
    (["--nodes", "2", "--rendezvous", "a:1", "--host-name", "a/b"], "must be a name without /"),
    (["--serve-rendezvous", "a:1", "--rendezvous", "a:1"], "'--rendezvous': cannot be combined"),
]


@pytest.mark.parametrize(("args", "rule"), REFUSED)
def test_options_that_cannot_work(args, rule):
    with pytest.raises(ConfigError, match=rule):
        call("launch", [*args, "--", "quickstart"])


def test_nodes_may_be_one_number():
    assert launch_options.limits("3") == (3, 3) and launch_options.limits("2:4") == (2, 4)


def test_an_address_that_others_cannot_use(monkeypatch):
    asked = ["--nodes", "2", "--rendezvous", "gpu01:5", "--address", "192.0.2.77"]
    with pytest.raises(ConfigError, match="is no address of this host"):
        launch_options.own_address(read("launch", [*asked, "--", "quickstart"]))
    launch = read("launch", [*asked[:4], "--", "quickstart"])
    monkeypatch.setattr(launch_options.addresses, "address_towards", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"is the loopback address 127.0.1.1 on this host"):
        launch_options.own_address(launch)
