"""The benchmark: its card says what was measured, and under what conditions."""

import json

import pytest

from jaxpar import bench
from jaxpar.config import ConfigError


def test_a_card(only_devices, config_file, tmp_path, capsys):
    file = tmp_path / "cards" / "tiny.json"
    command = ["train", config_file, "--steps", "4", "--card", str(file), "--commit", "abc"]
    with only_devices(2):
        assert bench.main([*command, "--train.seed", "3"]) == 0
    card = json.loads(file.read_text())
    seconds = card["step_seconds"]
    assert card["steps"] == 4
    assert 0 < seconds["fastest"] <= seconds["median"] <= seconds["slowest"]
    rate = 8 * 32 / seconds["median"] / 2
    assert card["tokens_per_second_per_device"] == pytest.approx(rate)
    assert card["mesh"] == "data=2" and card["commit"] == "abc"
    assert card["config"]["train"]["seed"] == 3
    assert {"jax", "device", "xla_flags", "gpu", "config_sha256", "attention"} <= card.keys()
    assert f"{rate:,.0f} tokens/s/device" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_its_losses_are_the_training_runs(only_devices, train_on, config_file, tmp_path):
    file = tmp_path / "card.json"
    with only_devices(2):
        bench.main(["train", config_file, "--steps", "3", "--card", str(file)])
    train_on(2, config_file, "--train.num-steps", "120", "--evaluation.every", "0")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    card = json.loads(file.read_text())
    assert card["loss"]["first"] == losses[0]
    assert card["loss"]["last"] == losses[bench.WARM_UP + 3 - 1]


def test_bad_options(config_file):
    with pytest.raises(ConfigError, match="--steps = 0: must be at least 1"):
        bench.main(["train", config_file, "--steps", "0"])
