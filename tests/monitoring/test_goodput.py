"""Where the time went: parts, lost work, time between attempts, and clocks that are set."""

import json
import math
import time

import pytest

from jaxpar.monitoring import goodput
from jaxpar.monitoring.goodput import (
    EVENTS_FILE,
    HostLoss,
    Recorder,
    described,
    host_losses,
    read_events,
)


def event(name: str, attempt: int, age: float, at: float, **more) -> dict:
    return {"event": name, "attempt": attempt, "age": age, "time": at, **more}


def spent(attempt: int, age: float, at: float, steps: list, **seconds) -> dict:
    return event("time", attempt, age, at, steps=steps, seconds=seconds)


#: Born at 990. Killed at 1100 after 30 steps, 20 of them saved; started again after 40 seconds.
TWO_ATTEMPTS = [
    event("start", 1, 10, 1000),
    event("from", 1, 20, 1010, step=0),
    spent(1, 20, 1010, [0, 0], init=12.0, compile=8.0),
    spent(1, 80, 1070, [0, 20], step=50.0, **{"data wait": 4.0, "save wait": 6.0}),
    spent(1, 110, 1100, [20, 30], step=30.0),
    event("start", 2, 10, 1150),
    spent(2, 20, 1160, [0, 0], init=10.0, restore=10.0),
    event("from", 2, 20, 1160, step=20),
    spent(2, 60, 1200, [20, 40], step=36.0, evaluation=4.0),
    event("end", 2, 60, 1200, reason="ended"),
]


def test_every_second_is_accounted_for():
    found = goodput.goodput(TWO_ATTEMPTS)
    assert found.attempts == 2
    assert found.total == pytest.approx(1200 - 990)
    assert found.seconds["down"] == 40
    assert found.seconds["lost work"] == 30
    assert found.seconds["step"] == 50 + 36
    assert found.seconds["init"] == 22 and found.seconds["save wait"] == 6
    assert found.fraction == pytest.approx(86 / 210)
    assert str(found).startswith("goodput 41.0% of 210.0 s in 2 attempts: step 86.0, down 40.0")


def test_waiting_for_an_attempt_that_still_runs_counts_once():
    """Born at 1040, while the first runs to 1100: it waits for the run's lock, and then begins."""
    moved = [e | {"age": e["age"] + 100} if e["attempt"] == 2 else e for e in TWO_ATTEMPTS]
    moved[6] = spent(2, 120, 1160, [0, 0], init=110.0, restore=10.0)
    found = goodput.goodput(moved)
    assert found.total == pytest.approx(1200 - 990)
    assert found.seconds["down"] == 0 and found.seconds["other"] == pytest.approx(0)
    assert found.seconds["init"] == pytest.approx(12 + 110 - 60)
    killed = goodput.goodput(moved[:6])  # as it waited: nothing says what the time went into
    assert killed.total == pytest.approx(1150 - 990)
    assert killed.seconds["init"] == 12 and killed.seconds["other"] == pytest.approx(50)


def test_a_rewind_within_a_span_loses_its_part():
    events = [
        event("start", 1, 0, 1000),
        spent(1, 90, 1090, [0, 50], step=90.0),
        spent(1, 100, 1100, [50, 50], step=10.0),
        event("from", 1, 100, 1100, step=40),
        spent(1, 160, 1160, [40, 70], step=60.0),
    ]
    found = goodput.goodput(events)
    assert found.seconds["lost work"] == pytest.approx(18 + 10)
    assert found.seconds["step"] == pytest.approx(72 + 60)


@pytest.mark.parametrize("jump", [-3600, -40])
def test_a_clock_that_is_set_back_takes_no_time_away(jump):
    jumped = [e | {"time": e["time"] + (jump if e["attempt"] == 2 else 0)} for e in TWO_ATTEMPTS]
    found = goodput.goodput(jumped)
    assert found.seconds["down"] == 0
    assert found.total == pytest.approx(110 + 60)


@pytest.mark.waits
def test_a_recorder_measures_with_a_clock_that_no_one_sets(devices, tmp_path, monkeypatch):
    wall = iter([1e9, 5e8, 2e9, *[3e8] * 20])  # it jumps about
    monkeypatch.setattr(goodput.time, "time", lambda: next(wall))
    with Recorder(tmp_path) as recorder:
        recorder.started(7, {"python and devices": 0.5, "compilation": 2.0, "checkpoint": 1.0})
        for part in ("data wait", "step"):
            recorder.now(part)
            time.sleep(0.02)
        recorder.record(9)
    events = read_events(tmp_path)
    assert [e["event"] for e in events] == ["start", "time", "from", "time", "time", "end"]
    assert events[1]["seconds"] == {"init": 0.5, "compile": 2.0, "restore": 1.0}
    assert events[3]["steps"] == [7, 9]
    assert 0.02 <= events[3]["seconds"]["step"] < 1e4 and events[3]["seconds"]["data wait"] >= 0.02
    ages = [e["age"] for e in events]
    assert ages == sorted(ages)


def test_a_run_that_restores_nothing_shows_no_restore(devices, tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.started(0, {"python and devices": 0.5, "weights": 1.0})
    events = read_events(tmp_path)
    assert events[1]["seconds"] == {"init": 1.5}
    assert "restore" not in str(goodput.goodput(events))


def test_attempts_are_appended_and_a_torn_line_is_passed_over(devices, tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path) as recorder:
        recorder.started(0, {})
        raise ZeroDivisionError("oh")
    first = (tmp_path / EVENTS_FILE).read_text()
    assert json.loads(first.splitlines()[-1])["reason"] == "ZeroDivisionError: oh"
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.write('{"event": "ti\n')
        file.write('{"event": "start"}\n{"event": 5, "attempt": 1, "age": 1, "time": 1}\n')
        whole = {"attempt": 1, "age": 1.0, "time": 1.0, "steps": [0, 1], "seconds": {"step": 1.0}}
        for damage in (
            {"age": math.inf},
            {"time": "x"},
            {"time": 10**399},
            {"steps": [0]},
            {"steps": [0, 10**399]},
            {"seconds": {"step": "x"}},
        ):
            file.write(json.dumps({"event": "time"} | whole | damage) + "\n")
    with Recorder(tmp_path):
        pass
    assert (tmp_path / EVENTS_FILE).read_text().startswith(first)
    assert [e["attempt"] for e in read_events(tmp_path) if e["event"] == "start"] == [1, 2]
    assert goodput.goodput(read_events(tmp_path)).attempts == 2


def test_losses_of_hosts_are_of_no_attempt_and_are_listed():
    events = [
        {"event": "start", "attempt": 1, "age": 1.0, "time": 100.0},
        {"event": "time", "attempt": 1, "age": 11.0, "time": 110.0, "steps": [0, 5]}
        | {"seconds": {"step": 10.0}},
        {"event": "start", "attempt": 2, "age": 1.0, "time": 131.0},
    ]
    formed = {"event": "generation", "attempt": 0, "age": 0.0, "time": 125.0, "step": 6}
    formed |= {"generation": 2, "lost": ["b"], "silent": 5.0, "seconds": 12.5}
    joined = formed | {"lost": [], "generation": 3}
    broken = formed | {"silent": "x"}
    among = [*events[:2], formed, joined, broken, events[2]]
    assert goodput.goodput(among) == goodput.goodput(events)
    assert goodput.goodput(events).seconds["down"] == 20.0
    losses = host_losses(among)
    assert losses == [HostLoss(("b",), 17.5, 6)]
    assert described([]) == "" and described(losses) == "hosts lost once: 17.5 s to the next steps"
    twice = [*losses, HostLoss(("a", "b"), 2.5, 9)]
    assert described(twice) == "hosts lost 2 times: 20.0 s to the next steps, median 10.0 s"
