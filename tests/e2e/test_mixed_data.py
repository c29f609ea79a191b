"""A run on a mixture of formats: resumed on another mesh, reported, and refused when it changes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.config import ConfigError
from jaxpar.data.formats.convert import convert
from jaxpar.data.options import ConvertOptions
from jaxpar.runtime import exit_codes


@pytest.fixture(scope="module")
def mixture(dataset: Path, tmp_path_factory) -> str:
    """A prepared folder and a Megatron pair."""
    prefix = tmp_path_factory.mktemp("pair") / "verses"
    convert(ConvertOptions(input=(str(dataset),), output=str(prefix), to="megatron"))
    return f"{dataset}:0.75,{prefix}:0.25"


@pytest.fixture(scope="module")
def args(mixture: str, dataset: Path) -> list[str]:
    """Twelve steps, saved every four."""
    values = ["--train.num-steps", "12", "--checkpoint.every", "4", "--evaluation.every", "12"]
    return [*values, "--data.mixture", mixture, "--data.held-out", str(dataset)]


@pytest.fixture(scope="module")
def finished(train_on, write_config, tmp_path_factory, args) -> Path:
    """The run on two devices. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("mixed")
    assert train_on(2, write_config(folder), *args) == exit_codes.EXIT_OK
    return folder / "run"


def records_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl about steps."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_epochs_of_each_source_are_reported(finished):
    epochs = np.array([record["epochs"] for record in records_of(finished)])
    assert epochs.shape == (12, 2) and (np.diff(epochs, axis=0) >= 0).all()
    assert 1.2 < epochs[-1, 0] / epochs[-1, 1] < 8  # 3 over many steps


@pytest.mark.slow
def test_a_run_on_a_mixture_goes_on_on_another_mesh(train_on, config_file, finished, args):
    run = Path(config_file).parent / "run"
    shutil.copytree(finished, run)
    for step in (8, 12):
        shutil.rmtree(checkpoint_folder(run) / str(step))
    mesh = ("--parallel.tensor", "2", "--parallel.data", "1")
    assert train_on(2, config_file, *args, *mesh) == exit_codes.EXIT_OK
    before, after = records_of(finished), records_of(run)[12:]
    assert [record["step"] for record in after] == list(range(5, 13))
    losses = [[record["loss"] for record in records] for records in (before[4:], after)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert [r["epochs"] for r in before[4:]] == [r["epochs"] for r in after]


def test_another_mixture_is_refused(train_on, config_file, finished, args, mixture):
    shutil.copytree(finished, Path(config_file).parent / "run")
    changed = mixture.replace("0.75", "0.5")
    with pytest.raises(ConfigError, match="is not the data of the checkpoint of step 12") as error:
        train_on(2, config_file, *args, "--data.mixture", changed, "--train.num-steps", "14")
    assert error.value.field == "data.mixture" and mixture in error.value.fix


def test_a_schedule_may_change_only_later_steps(
    train_on, config_file, finished, args, mixture, capsys
):
    shutil.copytree(finished, Path(config_file).parent / "run")
    more = [*args, "--train.num-steps", "14"]
    with pytest.raises(ConfigError, match="changes weights before step 12") as error:
        train_on(2, config_file, *more, "--data.mixture-schedule", "11:[1,1]")
    assert error.value.field == "data.mixture_schedule"
    later = ("--data.mixture-schedule", "13:[0,1]")
    assert train_on(2, config_file, *more, *later) == exit_codes.EXIT_OK
    assert "after step 13: 0.00%, 100.00% of the sequences" in capsys.readouterr().out
    before, last = (
        record["epochs"] for record in records_of(Path(config_file).parent / "run")[-2:]
    )
    assert last[0] == before[0] and last[1] > before[1]
