"""`--set section.field=value ...` on a command line."""

import pytest

from jaxpar import cli
from jaxpar.config import Config, ConfigError


def test_settings_in_a_row_are_fields():
    words = "--set train.num-steps=7 model.dtype=float32 --parallel.tensor 2 --set train.seed=3"
    cfg = cli.parse_overrides(Config(), words.split(), "test")
    assert (cfg.train.num_steps, cfg.model.dtype, cfg.parallel.tensor) == (7, "float32", 2)
    assert cfg.train.seed == 3


@pytest.mark.parametrize(
    ("words", "value"),
    [("--set", ""), ("--set --parallel.tensor 2", ""), ("--set train.seed 3", "train.seed")],
)
def test_a_setting_that_is_none_is_refused(words, value):
    with pytest.raises(ConfigError, match=f"--set = '{value}': is not SECTION.FIELD=VALUE"):
        cli.parse_overrides(Config(), words.split(), "test")
