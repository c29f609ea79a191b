"""Runs of several processes: killed, stopped, stuck, preempted; always the bits of one process."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.saved import checkpoint_folder, saved_steps
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.runtime import exit_codes
from tests import ranks

pytestmark = pytest.mark.waits


@pytest.fixture
def config(write_ranks, tmp_path) -> str:
    """A config file whose run goes to tmp_path/run."""
    return write_ranks(tmp_path)


def kill_at_random(launcher, run: Path, kills: int, seed: int) -> int:
    """SIGKILL so many random processes of a launched run, at any moment. Returns how many."""
    rng, done, before = random.Random(seed), 0, []
    while done < kills and launcher.poll() is None:
        pids = [pid for pid in ranks.children_of(launcher.pid) if ranks.alive(pid)]
        if len(pids) < 2 or pids == before:
            time.sleep(0.02)
            continue
        # Some during the start, some once steps are being taken.
        if rng.random() < 0.6:
            count = len(ranks.losses_of(run))
            until = time.monotonic() + 600
            while len(ranks.losses_of(run)) == count and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.4))
        else:
            time.sleep(rng.uniform(0, 3.0))
        if launcher.poll() is None:
            Path(f"/proc/{pids[0]}").exists() and ranks.os.kill(rng.choice(pids), signal.SIGKILL)
            done, before = done + 1, pids
    return done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_kills_leave_no_trace(config, tmp_path, whole):
    run = tmp_path / "run"
    process = ranks.launch(2, 2, "--restarts", "9", "--", config)
    kills = kill_at_random(process, run, 5, seed=0)
    code, said = ranks.finish(process)
    assert code == exit_codes.EXIT_OK, said[-3000:]
    assert kills >= 3 and said.count("killed by SIGKILL") == kills == said.count("restarting")
    ranks.assert_same_run(run, whole)


def test_one_sigterm_stops_all_processes_at_one_step(config, tmp_path, whole, train_on):
    run = tmp_path / "run"
    process = ranks.launch(2, 2, "--", config, FAULT="1 1 slow")
    ranks.wait_for(lambda: len(ranks.losses_of(run)) > 6)
    ranks.os.kill(ranks.children_of(process.pid)[1], signal.SIGTERM)
    code, said = ranks.finish(process)
    assert code == exit_codes.EXIT_PREEMPTED, said[-3000:]
    (saved,) = [line for line in said.splitlines() if line.startswith("SIGTERM: saved step")]
    assert saved_steps(run)[-1] == int(saved.split()[3].rstrip(";")) < 40
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [r for r in records if "slowest" in r]
    slow = [r for r in timed if r["slowest"].startswith("process 1 (")]
    assert slow and max(r["host_seconds_slowest"] for r in slow) > 0.25
    assert "process 1 (" in said and " is slow: 0." in said
    # The same command goes on; so does one process, with the same bits.
    assert train_on(4, config) == exit_codes.EXIT_OK
    ranks.assert_same_run(run, whole)


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one_as_users_compile_them(write_ranks, tmp_path):
    """With all of XLA's optimizations, which other tests do without."""
    users = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "XLA_FLAGS": ""}
    runs = [tmp_path / name for name in ("one", "two")]
    for processes, folder in zip((1, 2), runs, strict=True):
        folder.mkdir()
        words = ("--", write_ranks(folder))
        code, said = ranks.finish(ranks.launch(processes, 4 // processes, *words, **users))
        assert code == exit_codes.EXIT_OK, said[-3000:]
    one, two = (folder / "run" for folder in runs)
    ranks.assert_same_run(two, one)


def words_of(run: Path) -> dict[int, dict]:
    return {int(f.stem): json.loads(f.read_text()) for f in (run / "ranks").glob("*.json")}


@pytest.mark.slow
def test_a_process_that_sleeps_for_ever_is_found_out_and_the_run_goes_on(config, tmp_path, whole):
    run = tmp_path / "run"
    limits = ("--cluster.hang-seconds", "6", "--cluster.slow-seconds", "60")
    fault = {"FAULT": "1 12 sleep", "FAULT_ONCE": str(tmp_path / "done")}
    code, said = ranks.finish(ranks.launch(2, 2, "--", config, *limits, **fault))
    assert code == exit_codes.EXIT_OK, said[-3000:]
    assert "ended with code 124" in said and said.count("restarting") == 1
    words = words_of(run)
    assert {0, 1} == words.keys() and {w["code"] for w in words.values()} == {124}
    assert words[1]["step"] == 12 and words[1]["phase"] == "step"
    stacks = {i: (run / "ranks" / f"{i}.stacks.txt").read_text() for i in (0, 1)}
    assert "in fail" in stacks[1] and "train.py" in stacks[0]
    assert " of 4  jit(" in (run / "ranks" / "collectives.txt").read_text()
    ranks.assert_same_run(run, whole)


@pytest.mark.slow
def test_a_stopped_process_does_not_hold_the_others(config, tmp_path):
    limits = ("--cluster.hang-seconds", "6", "--cluster.slow-seconds", "60")
    arguments = ("--restarts", "0", "--", config, *limits)
    code, said = ranks.finish(ranks.launch(2, 2, *arguments, FAULT="1 12 SIGSTOP"))
    assert code == exit_codes.EXIT_HANG, said[-3000:]
    assert "hang: process 0" in said and "no new checkpoint after 0 restarts" in said
    assert words_of(tmp_path / "run").keys() == {0}  # the other could not say a thing


@pytest.fixture
def begun(config, tmp_path, whole) -> Path:
    """The run so far that `config` continues: 30 steps, in one process."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for later in (35, 40):
        shutil.rmtree(checkpoint_folder(run) / str(later))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= 30]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))
    return run


@pytest.mark.slow
def test_an_exception_in_one_process_ends_all_and_they_start_again_on_another_mesh(
    config, tmp_path, begun, whole
):
    mesh = ("--parallel.tensor", "2", "--parallel.data", "2")
    fault = {"FAULT": "1 37 raise", "FAULT_ONCE": str(tmp_path / "done")}
    code, said = ranks.finish(ranks.launch(2, 2, "--", config, *mesh, **fault))
    assert code == exit_codes.EXIT_OK, said[-3000:]
    assert "process 1 ended with code 1 at step 37: RuntimeError: a fault of this test" in said
    assert "in fail" in said  # the end of its log
    # The save of step 35 is under way when the exception comes, and may be done in time or not.
    assert re.search("launch: restarting from checkpoint (30|35), restart 1 of 3", said)
    found, wanted = ranks.losses_of(begun), ranks.losses_of(whole)
    assert sorted(found) == list(range(1, 41))
    np.testing.assert_allclose([found[i] for i in range(1, 41)], list(wanted.values()), rtol=1e-4)
    for mine, theirs in zip(ranks.weights_of(begun), ranks.weights_of(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_sigterm_during_the_start_of_a_run_that_goes_on_stops_it(config, tmp_path, begun):
    log = tmp_path / "log"
    with open(log, "w") as out:
        process = ranks.launch(2, 2, "--", config, out=out)
        ranks.wait_for(lambda: "cluster    " in log.read_text())
        ranks.os.kill(ranks.children_of(process.pid)[1], signal.SIGTERM)
        code, _ = ranks.finish(process)
    said = log.read_text()
    assert code == exit_codes.EXIT_PREEMPTED, said[-3000:]
    assert "restored step 30" in said and "SIGTERM: saved step 31;" in said
    assert saved_steps(begun)[-1] == 31


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_four_with_the_same_bits(config, begun, whole):
    code, said = ranks.finish(ranks.launch(4, 1, "--", config))
    assert code == exit_codes.EXIT_OK, said[-3000:]
    assert "restored step 30" in said
    ranks.assert_same_run(begun, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "each"), [(4, 1), (2, 2)])
def test_stages_in_branches_that_send_over_tensor_give_the_bits_of_one_process(
    config, tmp_path, train_on, processes, each
):
    """With a device in each process, all that goes over tensor goes from process to process."""
    mesh = "--parallel.pipeline 2 --parallel.virtual-stages 2 --parallel.tensor 2 --parallel.zero 1"
    words = f"{mesh} --parallel.num-microbatches 4 --model.num-layers 4 --train.num-steps 12"
    run, one = tmp_path / "run", tmp_path / "one"
    assert train_on(4, config, *words.split(), "--run.dir", str(one)) == exit_codes.EXIT_OK
    code, said = ranks.finish(ranks.launch(processes, each, "--", config, *words.split()))
    assert code == exit_codes.EXIT_OK, said[-3000:]
    ranks.assert_same_records(run, one)


def test_a_clock_that_jumps_changes_no_number(config, tmp_path, whole, train_on, monkeypatch):
    """A day ahead at step 17, back at 27. (Orbax may give up a save that is under way then.)"""
    write_previous, now, ahead = MetricsWriter.write_previous, time.time, [0.0]

    def jumping(self, step, *measured):
        ahead[0] = 86_400.0 if 17 <= step < 27 else 0.0
        write_previous(self, step, *measured)

    monkeypatch.setattr(MetricsWriter, "write_previous", jumping)
    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    assert train_on(4, config) == exit_codes.EXIT_OK
    ranks.assert_same_records(tmp_path / "run", whole)
