"""A stage of a program's work that takes long says what it does, while it does it."""

import contextlib
import os
import pty
import re
import subprocess
import sys
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


def test_a_stage_for_terminals_says_nothing_elsewhere(told):
    with told.stage("importing", live_only=True):
        assert told(100) == []


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


#: A program with a stage whose steps are counted, which ends with an error.
PROGRAM = """
import sys, time
from jaxpar.config import ConfigError
from jaxpar.runtime import program, stages, terminal

drawn, draw = [], stages.Stage.drawn

def record(self, width):
    found = draw(self, width)
    drawn.append(found and (self._bar or (self.what,))[-1])
    return found

def until_drawn(text):  # and once more: the line before is then on the screen
    while terminal.screen() and drawn.count(text) < 2:
        time.sleep(0.05)

stages.Stage.drawn = record

def main(_):
    with stages.stage("starting") as now:
        until_drawn("starting")
        now.enter("step 1", ordinary=True)
        stages.count(1, 4, "step 1/4   loss 2.5")
        until_drawn("step 1/4   loss 2.5")
        print("a line")
        terminal.warn("of something")
    print("rich" in sys.modules)
    raise ConfigError("a", "\\x1b[2J", "is bad", "use c")

program.run_program(main)
"""


def on_a_terminal(**env: str) -> str:
    """Run PROGRAM on a terminal. Returns what it writes."""
    screen, end = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=os.environ | env, **streams)
    os.close(end)
    text = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while part := os.read(screen, 4096):
            text += part
    os.close(screen)
    assert program.wait() == 2
    return text.decode()


@pytest.mark.waits
def test_a_terminal_has_a_live_line_in_color_and_a_dumb_one_or_a_pipe_does_not():
    colored = on_a_terminal(TERM="xterm-256color", NO_COLOR="")
    plain = on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    for text in (colored, plain):
        assert re.search(r"starting   \d+ s", text) and "━" in text
        assert "step 1/4   loss 2.5" in text
        assert "a line\r\n" in text and r"\x1b[2J" in text  # a stranger's, not obeyed
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b[1;33mWARNING\x1b[0m" in colored and "\x1b[1;31mconfig error:\x1b[0m" in colored
    assert not re.search(r"\x1b\[[\d;]*[34]\d[\d;]*m", plain)

    lines = "a line\nWARNING    of something\nFalse\n"
    lines += r"config error: a = '\x1b[2J': is bad. Fix: use c." + "\n"
    assert on_a_terminal(TERM="dumb").replace("\r", "") == lines
    piped = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert sorted((piped.stdout + piped.stderr).splitlines()) == sorted(lines.splitlines())
