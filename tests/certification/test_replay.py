"""A step taken again: bit for bit, and data, hardware and numerics told apart."""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import replay
from jaxpar.checkpoint.saved import METADATA, checkpoint_folder, saved_steps
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.config_file import CONFIGS, load_config
from jaxpar.config.serialize import to_json
from jaxpar.monitoring.recent_steps import RECENT_FILE, bits, read_recent
from jaxpar.runtime import exit_codes
from jaxpar.step import train_step
from tests.e2e.test_train import files_of
from tests.kept_steps import kept
from tests.training.test_guards import FLAGS, NOISE, noisy_batches

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture(scope="module")
def recorded(train_on, write_config, tmp_path_factory) -> Iterator[Path]:
    """A run on two devices, in which a batch is noise: of 20 steps, and then of 50, on whose curve
    the learning rate goes on."""
    folder = tmp_path_factory.mktemp("recorded")
    config = write_config(folder)
    with noisy_batches({NOISE}):
        for steps in ("20", "50"):
            assert train_on(2, config, *FLAGS, "--train.num-steps", steps) == exit_codes.EXIT_OK
        yield folder / "run"


@pytest.fixture
def run(recorded, tmp_path) -> Iterator[Path]:
    """The same, to be changed."""
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    yield recorded
    shutil.rmtree(recorded)
    shutil.move(copy, recorded)


@pytest.fixture
def again(run, only_devices, capsys, monkeypatch):
    """(step) -> the verdict; nothing may be written. Steps are those of tests/kept_steps.py."""
    monkeypatch.setattr(replay, "make_train_step", kept(replay.make_train_step))

    def take(number: int) -> str:
        before = files_of(run)
        with only_devices(2):
            text = replay.replay(replay.ReplayOptions(run=str(run), step=number))
        assert files_of(run) == before
        return text

    return take


def test_a_run_of_own_components_is_replayed_with_its_code(tmp_path):
    file = str(CONFIGS / "sigmoid_attention.py")
    asked = replace(load_config(file), **{"run.dir": str(tmp_path), "parallel.data": 1})
    (tmp_path / "config.json").write_text(to_json(asked))
    found = replay.config_of_step(tmp_path, None, (file,))
    assert found.model == asked.model and found.train.loss == asked.train.loss
    with pytest.raises(ConfigError, match=r"code is not loaded.*--code sigmoid_attention\.py"):
        replay.config_of_step(tmp_path, None)


def change(run: Path, number: int, loss: float) -> None:
    """Put another loss into a step's record."""
    lines = [json.loads(line) for line in (run / RECENT_FILE).read_text().splitlines()]
    for record in lines:
        if record["step"] == number:
            record["loss"], record["bits"]["loss"] = loss, bits(loss)
    (run / RECENT_FILE).write_text("".join(json.dumps(record) + "\n" for record in lines))


@pytest.mark.slow
def test_verdicts(run, again, capsys, monkeypatch):
    assert again(25) == "nothing wrong: the step repeats bit for bit"
    told = capsys.readouterr().out
    assert "step 25: batch 24, sequences [192, 200], from step 20 on mesh data=2" in told
    assert "elsewhere   loss" in told

    assert again(NOISE + 1).startswith(f"data: batch {NOISE} (sequences 368 to 375) causes it")

    change(run, 26, 7.5)  # as if a device had computed wrongly once
    assert again(26).startswith("hardware, transient: it does not happen again (recorded loss 7.5")

    counter = itertools.count()
    monkeypatch.setattr(replay, "fingerprints", lambda tree: {"step": str(next(counter))})
    assert again(25).startswith("hardware: the same step gave other bits on the same devices")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", -1),
        ("batch", 2**31),
        ("batch", True),
        ("batch", "3"),
        ("batch", 1.0),
        ("windows", [0]),
        ("windows", [8, 0]),
        ("windows", [-8, 0]),
        ("windows", 5),
        ("mesh", None),
    ],
)
def test_inputs_that_no_step_has_are_refused(name, value, tmp_path):
    record = {"step": 3, "batch": 2, "windows": [16, 24], "mesh": "data=2"}
    replay.check_inputs(record, tmp_path)
    said = f"recent.jsonl.*damaged record of step 3: {name} is {re.escape(repr(value))}"
    with pytest.raises(ConfigError, match=said):
        replay.check_inputs(record | {name: value}, tmp_path)


def test_a_record_of_an_impossible_batch_gets_no_verdict(run, only_devices, capsys):
    """It once was "hardware"; 10**25 was a traceback."""
    options = replay.ReplayOptions(run=str(run), step=25)
    text = (run / RECENT_FILE).read_text()
    for batch, said in (("-1", "record of step 25: batch"), ("1" + "0" * 25, "record")):
        (run / RECENT_FILE).write_text(text.replace('"batch": 24,', f'"batch": {batch},'))
        with only_devices(2), pytest.raises(ConfigError, match=said):
            replay.replay(options)
    assert "verdict" not in capsys.readouterr().out


@pytest.mark.slow
def test_numerics_are_told_from_data(run, again, monkeypatch):
    measure = train_step.gradients

    def broken(*args):
        """No numbers, whatever the batch, as soon as the weights have grown."""
        s = measure(*args)
        return s.with_metrics(loss=s.metrics["loss"] * jnp.nan)

    change(run, 45, float("nan"))
    lines = (run / RECENT_FILE).read_text().replace("NaN", "null")
    (run / RECENT_FILE).write_text(lines)
    monkeypatch.setattr(train_step, "gradients", broken)
    assert again(45).startswith("numerics: another batch also fails from this state")


def test_the_start_and_wrong_steps(run, again, only_devices):
    shutil.rmtree(run / "checkpoints")
    assert again(2) == "nothing wrong: the step repeats bit for bit"
    with pytest.raises(ConfigError, match=r"--step = 51: has no record in .* use one from 1 to 50"):
        again(51)
    options = replay.ReplayOptions(run=str(run), step=2)
    with only_devices(1), pytest.raises(ConfigError, match="on 2 devices, but here are 1"):
        replay.replay(options)
    two_processes = replace(Config(), **{"run.cpu_devices": 2, "parallel.data": 4})
    assert replay.in_one_process(two_processes).run.cpu_devices == 4


def test_damaged_checkpoints_are_passed_over(run, again, capsys):
    """The one before the step, and the one that has its config; nothing is moved."""
    steps = saved_steps(run)
    number = steps[1] + 1
    for step in steps[1:]:
        (checkpoint_folder(run) / str(step) / METADATA).write_text("[")
    assert again(number) == "nothing wrong: the step repeats bit for bit"
    told = capsys.readouterr()
    assert f"from step {steps[0]} on mesh data=2" in told.out
    *others, last = [line for line in told.err.splitlines() if line.startswith("WARNING")]
    assert f"step {steps[1]} of {run} is damaged: " in last
    assert last.endswith("The replay begins at an earlier step; nothing was moved.")
    for step, line in zip(steps[2:], others, strict=True):
        assert f"step {step} of {run} is damaged: " in line
        assert line.endswith("The config of a later start is used; nothing was moved.")
    assert len(steps) > 2


def test_the_ring_keeps_the_latest(tmp_path):
    from jaxpar.monitoring.recent_steps import RecentSteps

    ring = RecentSteps(tmp_path, 10)
    for number in range(1, 100):
        ring.add(number, {"loss": number / 3, "grad_norm": float("inf")}, batch=number - 1)
        assert len(read_recent(tmp_path)) <= 20
    with open(tmp_path / RECENT_FILE, "a") as file:
        file.write(
            '{"step": 98}\n{"step": 99, "loss": "x", "grad_norm": 1, "bits": {}}\n'
        )  # damaged
        file.write('{"step": 100, "lo')  # cut off by a crash
    found = read_recent(tmp_path)
    assert max(found) == 99 and len(found) >= 10 and found[99]["grad_norm"] is None
    assert found[99]["loss"] == 33.0 and found[98]["batch"] == 97
    assert jnp.float32(98 / 3) == np.uint32(int(found[98]["bits"]["loss"], 16)).view(np.float32)
    RecentSteps(tmp_path, 10).add(100, {"loss": 1.0, "grad_norm": 1.0})
    assert max(read_recent(tmp_path)) == 100


def test_a_number_of_times_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--repeat = 0: must be at least 1. Fix: use --repeat 2"):
        replay.replay(replay.ReplayOptions(run=str(tmp_path), step=1, repeat=0))


def test_no_array_is_read_before_the_devices_are_started(run, monkeypatch):
    """Reading one starts JAX, with as many devices as it finds."""

    class Started(Exception):
        pass

    def start(cfg):
        raise Started

    monkeypatch.setattr(replay.runtime, "start", start)
    monkeypatch.setattr(replay, "require_whole", lambda *_: pytest.fail("an array"))
    with pytest.raises(Started):
        replay.replay(replay.ReplayOptions(run=str(run), step=25))
