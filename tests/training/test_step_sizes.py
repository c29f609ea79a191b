"""Runs whose batch and length change by step: the same losses after a restart, on other meshes."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.verification.replay import ReplayOptions, replay

pytestmark = pytest.mark.usefixtures("quick_compile")

FIELDS = """--evaluation.every 0 --checkpoint.every 3 --optimizer.schedule constant
--optimizer.warmup-steps 1 --parallel.num-microbatches 2 --train.batch-schedule 0:4;2:8
--data.length-schedule 0:16;4:32""".split()
STEPS = 6
#: Sequences and tokens of each, by step.
SIZES = [(8, 16), (8, 16), (16, 16), (16, 16), (8, 32), (8, 32)]


def records(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.fixture
def whole(config_file, train_on, capfd):
    """A run on one device, whose output is kept."""
    assert train_on(1, config_file, *FIELDS, "--train.num-steps", "6") == exit_codes.EXIT_OK
    return Path(config_file).parent / "run"


def test_the_same_losses_after_a_restart_on_another_mesh(whole, config_file, train_on, capfd):
    said = capfd.readouterr().out
    assert "after step 4: steps of 8 sequences of 32 tokens in 2 microbatches" in said
    assert said.count("compiled for steps of ") == 3 and "batch 16 x 16" in said
    wanted = records(whole)
    sizes = [(wanted[n]["global_batch_size"], wanted[n]["seq_len"]) for n in range(1, STEPS + 1)]
    assert sizes == SIZES
    seen = np.cumsum([rows * length for rows, length in SIZES])
    assert [wanted[n]["tokens_seen"] for n in range(1, STEPS + 1)] == seen.tolist()
    assert read_saved(whole, 3).tokens_seen == seen[2]

    moved = [*FIELDS, "--run.dir", str(whole.with_name("moved"))]
    mesh = ["--parallel.data", "2", "--parallel.sequence", "2"]
    assert train_on(4, config_file, *moved, *mesh, "--train.num-steps", "3") == exit_codes.EXIT_OK
    mesh = ["--parallel.pipeline", "2", "--parallel.zero", "1"]
    assert train_on(2, config_file, *moved, *mesh, "--train.num-steps", "6") == exit_codes.EXIT_OK
    found = records(whole.with_name("moved"))
    for name in ("loss", "grad_norm"):
        values = [[there[n][name] for n in range(1, STEPS + 1)] for there in (found, wanted)]
        np.testing.assert_allclose(*values, rtol=2e-5)


def test_a_resumed_run_may_change_steps_to_come_only(whole, config_file, train_on):
    for fields, said in (
        (["--train.batch-schedule", "0:8"], "changes the size of steps before step 6"),
        (["--data.length-schedule", "0:32"], "changes the size of steps before step 6"),
        (["--train.global-batch-size", "16", "--train.batch-schedule", "0:8;2:16"], "before step"),
        (["--data.seq-len", "64", "--data.length-schedule", "0:16;4:64"], "data.seq_len = 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            train_on(1, config_file, *FIELDS, "--train.num-steps", "7", *fields)
    more = ["--train.batch-schedule", "0:4;2:8;6:16", "--train.global-batch-size", "16"]
    more += ["--parallel.num-microbatches", "4", "--train.num-steps", "7"]
    assert train_on(1, config_file, *FIELDS, *more) == exit_codes.EXIT_OK
    assert records(whole)[7]["tokens_seen"] == sum(a * b for a, b in SIZES) + 16 * 32


def test_a_step_is_replayed_with_its_size(whole, only_devices):
    """From the checkpoint of step 3, over steps of two sizes."""
    with only_devices(1):
        said = replay(ReplayOptions(run=str(whole), step=5, repeat=1))
    assert said.startswith("nothing wrong: the step repeats bit for bit")
