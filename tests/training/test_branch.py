"""A branch of a run: the same weights, moments and batches, with a schedule of its own."""

import json
from pathlib import Path

import pytest

from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import checkpoint_folder, saved_steps
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes

STABLE = """--train.num-steps 12 --checkpoint.every 4 --checkpoint.keep 3 --evaluation.every 0
--optimizer.schedule wsd --optimizer.warmup-steps 1 --optimizer.decay-steps 2""".split()
COOLDOWN = [*STABLE, "--train.num-steps", "8", "--optimizer.decay-steps", "4"]


@pytest.fixture
def run(config_file, train_on):
    """A run with checkpoints of steps 4, 8 and 12, of which the learning rate is constant to 10."""
    assert train_on(1, config_file, *STABLE) == exit_codes.EXIT_OK
    return Path(config_file).parent / "run"


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_a_cooldown_from_a_checkpoint_is_the_run_that_had_it_from_the_start(
    run, config_file, train_on, capsys
):
    whole, cooldown = run.with_name("whole"), run.with_name("cooldown")
    assert call("checkpoint", ["branch", str(run), str(cooldown), "--step", "4"]) == 0
    assert f"--run.dir {cooldown} --train.num-steps 8" in capsys.readouterr().out
    assert saved_steps(cooldown) == [4] and sorted(p.name for p in cooldown.iterdir()) == [
        "checkpoints"
    ]
    for place in (whole, cooldown):
        assert train_on(1, config_file, *COOLDOWN, "--run.dir", str(place)) == exit_codes.EXIT_OK
    wanted = losses(whole)
    assert losses(cooldown) == {step: wanted[step] for step in range(5, 9)}
    assert losses(run)[8] != wanted[8]  # the learning rate of the run was higher
    assert saved_steps(run) == [4, 8, 12]


def test_what_cannot_be_branched_is_one_error_and_makes_nothing(run, capsys):
    new = run.with_name("new")
    for words, said in (
        ([str(run), str(run)], "already exists"),
        ([str(run), str(new), "--step", "5"], "is not a checkpoint of"),
        ([str(run.with_name("none")), str(new)], "contains no finished checkpoint"),
        ([str(run), "gs://bucket/new"], "NEW"),
        ([str(run), str(run / "config.json" / "new")], "is a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            call("checkpoint", ["branch", *words])
    files = (p for p in (checkpoint_folder(run) / "12").rglob("*") if p.is_file())
    max(files, key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(Damaged):
        call("checkpoint", ["branch", str(run), str(new), "--step", "12"])
    assert not new.exists()
    assert call("checkpoint", ["branch", str(run), str(new)]) == 0  # the latest intact one
    assert saved_steps(new) == [8] and "step 12" in capsys.readouterr().err
