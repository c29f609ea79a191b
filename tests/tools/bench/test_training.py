"""The benchmark: its card says what was measured, and under what conditions."""

import contextlib
import io
import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from jaxpar.commands import call, read
from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import outputs
from jaxpar.tools.bench import cards, conditions, profiled, steps
from jaxpar.tools.bench import command as training
from jaxpar.tools.profiling.options import WARM_UP
from jaxpar.training import run
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture(scope="module")
def a_run(only_devices, write_config, tmp_path_factory):
    """Exit code, card, folder and console of a run on two devices, with its trace kept."""
    folder = tmp_path_factory.mktemp("bench")
    file, config = folder / "cards" / "tiny.json", write_config(folder)
    command = ["--bench", config, "--steps", "4", "--card", str(file), "--commit", "abc"]
    with only_devices(2), contextlib.redirect_stdout(io.StringIO()) as said:
        code = call("profile", [*command, "--trace", str(folder / "trace"), "--train.seed", "3"])
    return code, json.loads(file.read_text()), folder, said.getvalue()


def test_a_card(a_run):
    code, card, folder, said = a_run
    assert code == 0
    seconds = card["step_seconds"]
    assert card["steps"] == 4
    assert 0 < seconds["fastest"] <= seconds["median"] <= seconds["slowest"]
    assert 0 <= seconds["interquartile"] <= seconds["slowest"] - seconds["fastest"]
    rate = 8 * 32 / seconds["median"] / 2
    assert card["tokens_per_second_per_device"] == pytest.approx(rate)
    assert card["mesh"] == "data=2" and card["commit"] == "abc"
    assert card["config"]["train"]["seed"] == 3
    assert {"jax", "device", "xla_flags", "gpu", "config_sha256", "attention"} <= card.keys()
    assert card["compile_seconds"] > 0 and card["data_wait_seconds"]["median"] >= 0
    assert (card["power"], card["power_missing"]) == (None, "no GPU")
    assert f"{rate:,.0f} tokens/s/device" in said
    assert not (folder / "run").exists()


def test_without_a_gpu_there_is_no_profile_and_it_says_why(a_run):
    _, card, folder, said = a_run
    assert card["profile"] is None
    assert card["profile_missing"] == "the trace has no GPU plane"
    assert said.splitlines()[-1] == "no profile: the trace has no GPU plane"
    assert list((folder / "trace").rglob("*.xplane.pb"))


def test_what_the_step_sends(a_run):
    """FSDP over two devices: weights are gathered, gradients scattered."""
    _, card, _, said = a_run
    sent = card["collective_bytes"]
    assert sent["unknown"] == [] and sent["kinds"]["all-gather"]["count"] > 0
    assert sent["bytes"] == sum(row["bytes"] for row in sent["kinds"].values())
    assert f"sends {sent['bytes'] / 1e9:,.3f} GB per step (" in said


def test_its_losses_are_the_training_runs(a_run, train_on, tmp_path):
    _, card, folder, _ = a_run
    alone = ["--run.dir", str(tmp_path / "run"), "--checkpoint.every", "0"]
    alone += ["--train.seed", "3", "--evaluation.every", "0"]
    train_on(2, str(folder / "tiny.py"), *alone)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in line]
    assert card["loss"]["first"] == losses[0]
    assert card["loss"]["last"] == losses[WARM_UP + 4 - 1]


@pytest.mark.slow
def test_it_looks_at_no_run(only_devices, config_file, tmp_path, monkeypatch):
    """What lies at the run.dir of its card is neither read nor moved."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "bench"
    (folder / "checkpoints" / "10").mkdir(parents=True)
    for name in ("skipped_batches.json", "checkpoints/10/_CHECKPOINT_METADATA"):
        (folder / name).write_text("no JSON")
    before = sorted(folder.rglob("*"))
    with only_devices(1):
        words = ["--bench", config_file, "--steps", "1", "--profile-steps", "0"]
        assert call("profile", words) == 0
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_profiled_steps_go_on_from_the_timed_ones(only_devices, config_file, monkeypatch):
    """They take the next batches, and end the loader; with none asked for, none are run."""
    cfg = training.config_of(read("profile", ["--bench", config_file]))
    seen = []
    with only_devices(1):
        figures, running = training.measure(run.Run.open(cfg), 2, warm_up=5)
        step = running.step
        running.step = lambda state, batch: seen.append(int(state.step)) or step(state, batch)
        assert profiled.profile_steps(running, 0)["profile_missing"].startswith("not requested")
        assert seen == [] and next(running.batches, None) is None
        running.batches = run.Run.open(cfg).loader.prefetched(0)
        assert profiled.profile_steps(running, 2)["profile"] is None
    first = 5 + 2 + 1
    assert seen == list(range(first, first + profiled.SETTLE + 2))
    assert (figures["steps"], figures["warm_up_steps"]) == (2, 5)


def test_a_card_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    file = tmp_path / "cards" / "a.json"
    outputs.write_json("--card", file, {"a": 1})
    before = file.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(exit_codes.RunError) as error:
        outputs.write_json("--card", file, {"a": 2})
    assert str(error.value) == (
        f"--card = {str(file)!r}: cannot be written: No space left on device. "
        "The existing file is unchanged"
    )
    assert file.read_text() == before and list(file.parent.iterdir()) == [file]


def test_a_card_goes_through_a_link_and_into_what_is_no_file(tmp_path):
    file, link = tmp_path / "a.json", tmp_path / "link"
    link.symlink_to(file)
    outputs.write_json("--card", link, 1)
    assert link.is_symlink() and file.read_text() == "1\n"
    outputs.write_json("--card", "/dev/null", 1)
    assert not Path("/dev/null").is_file()


def test_a_card_is_looked_at_where_it_is_written(config_file):
    words = ["--bench", config_file, "--card", "/", "--cluster.num-processes", "2"]
    words += ["--cluster.coordinator", "localhost:1"]
    with pytest.raises(ConfigError, match="--card = '/': is a folder"):
        training.config_of(read("profile", [*words, "--cluster.process-id", "0"]))
    training.config_of(read("profile", [*words, "--cluster.process-id", "1"]))


def test_progress_is_told_every_few_seconds(capsys):
    told = steps.progress([1.0], -10.0, 9)
    assert told == -10.0 and capsys.readouterr().out == ""  # no step has a time yet
    told = steps.progress([1.0, 3.5], told, 9)
    assert told == 3.5 and capsys.readouterr().out == "step 2 of 9: 2.500 s\n"
    assert steps.progress([1.0, 3.5, 4.0], told, 9) == 3.5


def timed_until(last: int, warm_up: int, number: signal.Signals = signal.SIGTERM):
    """Ten steps after a warm-up, of which a signal comes with the last one that is waited for."""

    def step(state: int, batch: int):
        if state == last:
            signal.raise_signal(number)
        return state + 1, {"loss": float(batch)}

    gpus, dispatched = conditions.Watch(), []
    first_done = lambda: dispatched.append(1)  # noqa: E731
    given = step, 0, itertools.count(), warm_up, 10, gpus, first_done
    found, state = steps.time_steps(*given)
    assert dispatched == [1] and len(found.losses) == len(found.times) == state - 1
    assert found.losses == list(range(state - 1))
    return found


@pytest.mark.parametrize(
    ("last", "warm_up", "begin", "timed"),
    [
        (8, 5, 5, 3),  # in the timed steps
        (8, 30, 3, 5),  # in the warm-up: its steps after the first three
        (8, 8, 3, 5),  # at its end
        (2, 3, 3, 0),  # before any of them
    ],
)
def test_a_signal_keeps_the_steps_so_far(last, warm_up, begin, timed):
    found = timed_until(last, warm_up)
    assert found.cut_short == "SIGTERM"
    assert (found.begin, len(found.seconds)) == (begin, timed)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_after_the_last_timed_step_changes_nothing():
    found = timed_until(15, 5, signal.SIGINT)
    assert found.cut_short == "" and steps.cut_short_card(found, 10) == {}
    assert (found.begin, len(found.seconds)) == (5, 10)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), slow(signal.SIGINT, 130)], ids=str
)
def test_a_card_that_is_cut_short(number, code, only_devices, config_file, tmp_path, monkeypatch):
    """In the warm-up: the card has its steps, says so, and a comparison warns."""
    file, told = tmp_path / "card.json", steps.progress

    def progress(times, *rest):
        if len(times) == 6:
            signal.raise_signal(number)
        return told(times, *rest)

    monkeypatch.setattr(steps, "progress", progress)
    words = ["--bench", config_file, "--warm-up", "40", "--card", str(file)]
    with only_devices(1), contextlib.redirect_stdout(io.StringIO()) as said:
        assert call("profile", words) == code
    card = json.loads(file.read_text())
    assert card["cut_short"] == {"by": number.name, "asked": {"warm_up_steps": 40, "steps": 20}}
    assert (card["warm_up_steps"], card["steps"]) == (3, 3)
    assert card["step_seconds"]["median"] > 0 and "profile" not in card
    line = f"cut short by {number.name}: 3 timed steps after 3, of 20 after 40"
    assert said.getvalue().splitlines()[-1] == line
    assert f"warning: B was cut short by {number.name}" in cards.comparison(
        ["a", "b"], [card | {"cut_short": None}, card]
    )
