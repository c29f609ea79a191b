"""What is over in time is left alone; what is not leaves its stacks, and ends with 124."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.runtime import watchdog
from jaxpar.runtime.watchdog import Watchdog
from tests.ranks import HANG, environment
from tests.runtime.watchdog_clock import Clock

pytestmark = pytest.mark.waits

#: Its limit is short, since it is looked at four times within it.
SCRIPT = """
import sys, time
from jaxpar.runtime import watchdog
from tests.runtime.watchdog_clock import Clock
if "busy" in sys.argv:
    watchdog.time = clock = Clock()
if "soon" in sys.argv:
    watchdog.TELL_SECONDS = watchdog.REPORT_SECONDS = 0.5  # nothing is written anyway
with watchdog.Watchdog(sys.argv[1], 0.2, 60.0) as watch:
    if "busy" in sys.argv:
        watch.enter("evaluation", 6, slow=True)
        clock.advance(2.5)
        for step in range(5):
            watch.enter("step", 7 + step)
            clock.advance(0.1)
    watch.enter("data", 12)
    if "busy" in sys.argv:
        clock.now += 2
    def stuck():
        time.sleep(1000)
    stuck()
"""


def hang(run: Path, *before: str) -> subprocess.CompletedProcess:
    """A process that hangs, at once or after it was busy, and writes to a run's folder."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run), *before],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 124, done.stderr  # faulthandler's is 1
    return done


def test_a_hang_ends_with_its_stacks_step_and_phase(tmp_path):
    done = hang(tmp_path, "busy")
    words = json.loads((tmp_path / "ranks" / "0.json").read_text())
    assert (words["code"], words["step"], words["phase"]) == (124, 12, "data")
    assert 1 <= words["seconds_in_phase"] < 3
    stacks = (tmp_path / "ranks" / "0.stacks.txt").read_text()
    assert "in stuck" in stacks and "step 12, data: not finished after" in stacks
    assert "hang: process 0: step 12, data" in done.stderr


def test_a_hang_ends_where_the_run_folder_takes_no_file(tmp_path):
    (tmp_path / "ranks").write_text("no folder")
    said = hang(tmp_path).stderr
    assert "hang: process 0: step 12, data" in said and "in stuck" in said
    assert "0.stacks.txt cannot be written (Not a directory)" in said


def test_a_hang_ends_where_the_run_folders_file_system_hangs_too(tmp_path):
    (tmp_path / "ranks").mkdir()
    os.mkfifo(tmp_path / "ranks" / "0.json")  # nobody reads of it: opening it waits for ever
    hang(tmp_path, "soon")


def test_what_is_not_hung_leaves_nothing(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    with Watchdog(tmp_path, 0.1, 0.1) as watch:
        for step in range(6):
            watch.enter("step", step)
            clock.advance(0.08)
    with Watchdog(tmp_path, 0, 0) as watch:
        watch.enter("step", 1)
        clock.now += 1000
    assert list(Path(tmp_path).iterdir()) == []


def test_it_costs_the_loop_nothing_to_speak_of(tmp_path):
    with Watchdog(tmp_path, 60, 60) as watch:
        began = time.thread_time()  # not while others have the core
        for step in range(10_000):
            watch.enter("step", step)
        assert (time.thread_time() - began) / 10_000 < 50e-6
