"""scripts/measure/random_failures.py: what it makes of a run, and a run of seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.goodput.failures import HOUR, KINDS, Rates
from scripts.measure import random_failures_report as report
from scripts.measure.random_failures_report import Seen, Trial

ROOT = Path(__file__).resolve().parents[2]

RATES = Rates(**dict.fromkeys(KINDS, float("inf")) | {"host": 4 * 100 / HOUR})


def event(name, time, attempt=1, **more):
    return {"event": name, "time": time, "attempt": attempt} | more


def steps(first, last, begins, each):
    """Records of steps; the first ends at `begins`, and has no time."""
    count = range(last - first + 1)
    return [Seen(begins + i * each, first + i, each if i else None, 1.0) for i in count]


@pytest.fixture
def trial():
    """Four hosts with steps of 1 s. One is lost in step 13 at 12.5 s; three resume step 11, of
    1.25 s, at 22 s. It is back at 30 s, stops them after step 20, and all go on at 45 s. Step 31
    comes 0.4 s late."""
    records = steps(1, 13, 0.0, 1.0) + steps(11, 20, 22.0, 1.25)
    records += steps(21, 30, 45.0, 1.0) + steps(31, 35, 55.4, 1.0)
    events = [
        *(event("start", -9.0, devices=8), event("copied", 10.2, loop_waited=0.1)),
        *(event("start", 15.0, 2, devices=6), event("start", 38.0, 3, devices=8)),
        event("restored", 18.0, 2, source="memory", seconds=2.0, step=10),
        event("restored", 41.0, 3, source="checkpoint", seconds=3.0, step=20),
        event("saved", 36.0, 2, loop_waited=0.5, seconds=2.5),
        event("generation", 22.0, 0, step=11, seconds=8.5, lost=["host2"]),
        event("generation", 45.0, 0, step=21, seconds=9.5, lost=[]),
        event("generation", 0.1, 0, step=1, seconds=9.0, lost=[]),
    ]
    events[1] |= {"write_seconds": 0.2, "send_seconds": 0.3}
    return Trial("both", 10, 60.0, 4, records, [(12.5, 2)], [(30.0, 2)], events)


def test_where_the_time_of_a_run_went(trial):
    times = report.step_times([trial])
    assert times == {3: 1.25, 4: 1.0}
    counted, parts = report.measured_parts(trial, times)
    # Steps 2 to 35. Three were repeated; half a second was cut off. 9.5 s to the next step, of
    # which it took 1.25; the last step before the host came back ended at 33.25.
    assert counted == 34 and list(parts.values())[:2] == [34.0, 3.0 + 0.5]
    assert parts["not training"] == 9.5 - 1.25 + (45 - 33.25) - 1
    assert sum(parts.values()) == 60
    lost, back = trial.recoveries()
    assert (lost.loss, lost.seconds, lost.repeated, lost.source) == (True, 9.5, 3, "memory")
    assert (back.loss, back.seconds, back.hosts, back.repeated) == (False, 11.75, 4, 0)


def test_the_simulator_gets_the_means_of_a_run(trial):
    policy = report.policy_of(trial, report.step_times([trial]), 100, 17.5, 2)
    assert (policy.step, policy.repair, policy.fewest) == (1.0, 17.5, 2)
    assert policy.detect == 1.0 and policy.restart == pytest.approx(9.0 - 2.5 - 1.0)
    assert (policy.disk.every, policy.disk.blocking, policy.disk.load) == (100, 0.5, 3.0)
    assert policy.disk.seconds == 2.0 and policy.memory.seconds == 0.5
    assert policy.memory.blocking == pytest.approx(0.4)  # by which the one copy delayed a step
    assert policy.fixed == pytest.approx(0.25)  # 0.25 + 0.75 * 4/3 = 1.25
    found = report.of_trials([trial], 100, 17.5, 2, RATES)
    (run,) = found["runs"]
    # At 12.5 + 1 + 5.5 + 2 = 21 s; 30 s: within step 18; saved at 33; back at 41.5.
    assert abs(run["goodput"] - run["predicted"]) < 0.05
    assert "| goodput | 56.7% |" in report.as_text(found)


def test_the_fixed_part_of_a_step():
    assert report.fixed_part({4: 3.0, 3: 3.0, 2: 3.0}, 4) == 3.0
    assert report.fixed_part({4: 3.0, 3: 4.0, 2: 6.0}, 4) == pytest.approx(0.0)
    assert report.fixed_part({4: 3.0}, 4) == 0.0


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_loses_a_host(tmp_path):
    """Seed 54 has one loss, at 16 s."""
    command = [sys.executable, str(ROOT / "scripts" / "measure" / "random_failures.py")]
    command += ["--hosts", "2", "--least", "1", "--seconds", "170", "--mtbf", "100"]
    command += ["--seed", "54", "--back", "1000", "--every", "1000", "--only", "memory"]
    command += ["--card", str(tmp_path / "card.json")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = json.loads((tmp_path / "card.json").read_text())["runs"]
    (lost,) = run["recoveries"]
    assert len(run["trial"]["losses"]) == 1 and lost["loss"] and lost["hosts"] == 1
    assert lost["source"] == "memory" and lost["repeated"] <= 2 * 5  # the last copy may be partial
    assert run["furthest_repeated_loss"] < 1e-5
    assert "predicted, same losses" in done.stdout
