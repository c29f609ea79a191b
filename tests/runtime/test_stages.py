"""A stage of a program's work that takes long says what it does, while it does it."""

import re
import threading
import time

import pytest

from jaxpar.runtime import stages
from jaxpar.runtime.stages import Stages


@pytest.fixture
def clock(monkeypatch):
    """The time by which stages go; threads do not look by themselves."""

    class Clock:
        now = 1000.0

    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            pass

    monkeypatch.setattr(stages.time, "monotonic", lambda: Clock.now)
    monkeypatch.setattr(stages.threading, "Thread", NoThread)
    return Clock


@pytest.fixture
def told(clock):
    """(seconds) -> the lines that are shown until then, in a look every second."""
    lines: list[str] = []
    made = Stages(lines.append)

    def until(seconds: float) -> list[str]:
        lines.clear()
        while clock.now < 1000 + seconds:
            clock.now += 1
            made.look(clock.now)
        return list(lines)

    until.stage = made.stage
    return until


def test_a_short_stage_says_nothing(told):
    with told.stage("reading"):
        assert told(9) == []
    assert told(100) == []


def test_a_long_stage_says_what_it_does(told):
    with told.stage("compiling the train step"):
        assert told(39) == ["compiling the train step: 10 s so far"]
        assert told(101) == [f"compiling the train step: {n} s so far" for n in (40, 70, 100)]
    assert told(200) == []


def test_the_innermost_stage_is_told_and_where_it_is(told):
    with told.stage("replaying"):
        told(5)
        with told.stage("repeating steps 1 to 99") as steps:
            steps.at("step 7")
            assert told(16) == ["repeating steps 1 to 99: 10 s so far, at step 7"]
        assert told(17) == ["replaying: 17 s so far"]


def test_ordinary_stages_do_not_each_say_so(told):
    """Train steps of 15 s: a line every 30 s or so, not one for each."""
    with told.stage("training") as now:
        lines = []
        for step in range(1, 9):
            now.enter(f"step {step} of 8", ordinary=True)
            lines += told(15 * step)
        assert lines == [f"step {step} of 8: 10 s so far" for step in (1, 3, 5, 7)]
        now.enter("evaluation at step 8")
        assert told(131) == ["evaluation at step 8: 10 s so far"]


def test_a_failing_block_ends_its_stage(told):
    with pytest.raises(ZeroDivisionError), told.stage("reading"):
        raise ZeroDivisionError
    assert told(100) == []


@pytest.mark.waits
def test_a_thread_looks(monkeypatch, capfd):
    monkeypatch.setattr(stages, "FIRST", 0.05)
    monkeypatch.setattr(stages, "LOOK_EVERY", 0.02)
    with stages.stage("sleeping") as now:
        now.at("the middle")
        said = ""
        for _ in range(200):  # the other thread may be in the middle of its line
            time.sleep(0.02)
            said += capfd.readouterr().err
            if said.endswith("\n"):
                break
    assert re.fullmatch(r"sleeping: \d+ s so far, at the middle\n", said)
    assert sum(thread.name == "stages" for thread in threading.enumerate()) == 1
