"""What a run prints at its start."""

from jaxpar.config.command_line import read_config
from jaxpar.training import manifest
from jaxpar.training.run import Run


def test_a_shortened_warm_up_is_told(only_devices, config_file, capfd):
    cfg = read_config([config_file, "--train.num-steps", "8"])
    with only_devices(2):
        manifest.write(Run.open(cfg), [])
    told = "warm-up    0 steps, not optimizer.warmup_steps = 10, in a run of 8"
    assert told in capfd.readouterr().out.splitlines()
