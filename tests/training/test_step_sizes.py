"""Runs whose batch, length and mixture change by step: the same losses on other meshes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxpar.certification.replay import ReplayOptions, replay
from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.training.step_guard import StepGuard
from tests import ranks
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

FIELDS = """--evaluation.every 0 --checkpoint.every 3 --optimizer.schedule constant
--optimizer.warmup-steps 1 --parallel.num-microbatches 2 --train.batch-schedule 0:4,2:8
--data.length-schedule 0:16,4:32""".split()
STEPS = 6
#: Sequences and tokens of each, by step.
SIZES = [(8, 16), (8, 16), (16, 16), (16, 16), (8, 32), (8, 32)]


def records(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def fields(dataset, tmp_path_factory) -> list[str]:
    """Those of every run: FIELDS, and two sources."""
    other = shutil.copytree(dataset, tmp_path_factory.mktemp("copy") / "other")
    mixture = ["--data.mixture", f"{dataset}:1,{other}:3", "--data.mixture-schedule", "3:[1,0]"]
    return [*FIELDS, *mixture]


@pytest.fixture(scope="module")
def whole(write_config, train_on, fields, tmp_path_factory) -> Path:
    """A run on one device. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("sizes")
    config = write_config(folder)
    assert train_on(1, config, *fields, "--train.num-steps", "6") == exit_codes.EXIT_OK
    return folder / "run"


#: Devices and mesh.
FIRST = (4, "--parallel.data 2 --parallel.sequence 2")
STAGES = (2, "--parallel.pipeline 2 --parallel.zero 1")

#: {the last step of a part of the run: its devices and mesh}, and the programs of all parts.
PARTS = [
    pytest.param({6: FIRST}, 3, id="at once", marks=pytest.mark.slow),
    slow({3: FIRST, 6: FIRST}, 4, id="restarted"),
    slow({3: FIRST, 6: STAGES}, 4, id="restarted on another mesh"),
]


@pytest.mark.parametrize(("parts", "programs"), PARTS)
def test_the_same_losses_on_other_devices(
    parts, programs, whole, fields, config_file, train_on, capfd
):
    wanted = records(whole)
    sizes = [(wanted[n]["global_batch_size"], wanted[n]["seq_len"]) for n in range(1, STEPS + 1)]
    assert sizes == SIZES
    seen = np.cumsum([rows * length for rows, length in SIZES])
    assert [wanted[n]["tokens_seen"] for n in range(1, STEPS + 1)] == seen.tolist()
    assert read_saved(whole, 3).tokens_seen == seen[2]

    moved, run = [*fields, "--train.num-steps"], Path(config_file).parent / "run"
    for steps, (devices, mesh) in parts.items():
        code = train_on(devices, config_file, *moved, str(steps), *mesh.split())
        assert code == exit_codes.EXIT_OK
    said = capfd.readouterr().out
    assert "after step 4: steps of 8 sequences of 32 tokens in 2 microbatches" in said
    # Compiled, or read from the cache.
    assert said.count(" for steps of ") == programs and "batch 16 x 16" in said
    found = records(run)
    for name in ("loss", "grad_norm"):
        values = [[there[n][name] for n in range(1, STEPS + 1)] for there in (found, wanted)]
        np.testing.assert_allclose(*values, rtol=2e-5)
    for name in ("epochs", "tokens_seen", "num_tokens"):
        assert [found[n][name] for n in found] == [wanted[n][name] for n in wanted]
    taken = [ranks.batches_of(run) for run in (whole, run)]
    assert taken[0] == taken[1] and len(taken[0]) == STEPS


@pytest.mark.slow  # quicker: data/test_step_sizes.py
def test_a_resumed_run_may_change_steps_to_come_only(whole, fields, config_file, train_on):
    run = shutil.copytree(whole, Path(config_file).parent / "run")
    for change, said in (
        (["--train.batch-schedule", "0:8"], "changes the size of steps before step 6"),
        (["--data.length-schedule", "0:32"], "changes the size of steps before step 6"),
        (["--train.global-batch-size", "16", "--train.batch-schedule", "0:8,2:16"], "before step"),
        (["--data.seq-len", "64", "--data.length-schedule", "0:16,4:64"], "data.seq_len = 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            train_on(1, config_file, *fields, "--train.num-steps", "7", *change)
    more = ["--train.batch-schedule", "0:4,2:8,6:16", "--train.global-batch-size", "16"]
    more += ["--parallel.num-microbatches", "4", "--train.num-steps", "7"]
    assert train_on(1, config_file, *fields, *more) == exit_codes.EXIT_OK
    assert records(run)[7]["tokens_seen"] == sum(a * b for a, b in SIZES) + 16 * 32


@pytest.mark.slow  # quicker: certification/test_replay.py
def test_a_step_is_replayed_with_its_size(whole, only_devices):
    """From the checkpoint of step 3, over steps of two sizes."""
    with only_devices(1):
        said = replay(ReplayOptions(run=str(whole), step=5, repeat=1))
    assert said.startswith("nothing wrong: the step repeats bit for bit")


@pytest.mark.slow  # quicker: rewinds of test_guards.py
def test_batches_keep_their_sizes_after_a_rewind(config_file, fields, train_on, monkeypatch):
    """Batch 3, of the fourth step, is skipped: that step uses batch 4, of another size."""
    look, raised = StepGuard.look, []

    def spike_once(self, step, values):
        if step == 3 and not raised:
            raised.append(step)
            raise exit_codes.Spike(step, "a spike of this test")
        look(self, step, values)

    monkeypatch.setattr(StepGuard, "look", spike_once)
    more = ["--train.num-steps", "6", "--guard.spike", "rewind", "--guard.spike-skip", "1"]
    assert train_on(1, config_file, *fields, *more) == exit_codes.EXIT_OK
    found = records(Path(config_file).parent / "run")
    sizes = [*SIZES[:3], *SIZES[4:], SIZES[-1]]
    assert [(found[n]["global_batch_size"], found[n]["seq_len"]) for n in found] == sizes
    seen = np.cumsum([rows * length for rows, length in sizes])
    assert [found[n]["tokens_seen"] for n in found] == seen.tolist()
    assert read_saved(Path(config_file).parent / "run").tokens_seen == seen[-1]
