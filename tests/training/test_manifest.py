"""What a run prints at its start."""

import json
from pathlib import Path

import pytest

from jaxpar.config.command_line import read_config
from jaxpar.training import manifest
from jaxpar.training.run import Run


@pytest.mark.parametrize("verbose", [False, True])
def test_what_a_run_prints_at_its_start(only_devices, config_file, capfd, verbose):
    options = ["--train.num-steps", "8", "--run.verbose", str(verbose)]
    cfg = read_config([config_file, *options])
    with only_devices(2):
        manifest.write(Run.open(cfg), ["XLA_FLAGS=--xla_dump_to=x"])
    lines = capfd.readouterr().out.splitlines()
    assert "warm-up    0 steps, not optimizer.warmup_steps = 10, in a run of 8" in lines
    begun = {line.split(" ")[0] for line in lines}
    assert ({"execution", "set"} <= begun) is verbose
    written = json.loads((Path(cfg.run.dir) / "manifest.json").read_text())
    assert written["execution"] and written["environment"] == ["XLA_FLAGS=--xla_dump_to=x"]
