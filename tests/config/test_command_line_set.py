"""`--set section.field=value ...` on a command line."""

import pytest

from jaxpar.commands import read
from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import parse_overrides
from jaxpar.tools.bench import command as training


def test_settings_in_a_row_are_fields():
    words = "--set train.num-steps=7 compute.dtype=float32 --parallel.tensor 2 --set train.seed=3"
    cfg = parse_overrides(Config(), words.split())
    assert (cfg.train.num_steps, cfg.compute.dtype, cfg.parallel.tensor) == (7, "float32", 2)
    assert cfg.train.seed == 3


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--set", ""),
        ("--set --parallel.tensor 2", ""),
        ("--set train.seed 3", "train.seed"),
        ("--set=train.seed=3", "set=train.seed=3"),
    ],
)
def test_a_setting_that_is_none_is_refused(words, value):
    with pytest.raises(ConfigError, match=f"--set = '{value}': is not SECTION.FIELD=VALUE"):
        parse_overrides(Config(), words.split())


@pytest.mark.parametrize("field", ["run.dir", "run.init_from"])
def test_a_benchmark_refuses_what_it_does_not_use(field):
    with pytest.raises(ConfigError, match=f"{field} = 'there': has no effect"):
        words = ["--bench", "quickstart", "--set", "train.seed=3", f"{field}=there"]
        training.config_of(read("profile", words))
