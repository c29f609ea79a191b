"""Which text a run is evaluated on."""

import pytest

from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.data.prepare.text import PrepareOptions, prepare
from jaxpar.training.run import Run


def test_the_split_to_evaluate_on(only_devices, config_file, text_file, tmp_path):
    three = str(tmp_path / "three")
    prepare(PrepareOptions(input=(str(text_file),), output=three, split="2,1,1"))

    def run(*arguments: str) -> Run:
        with only_devices(2):
            return Run(read_config([config_file, *arguments], "jaxpar.train", ""))

    other = ("--data.path", three)
    for arguments in ((), other, (*other, "--evaluation.split", "test")):
        (source,) = run(*arguments).held_out.sources
        assert source.dataset.split == ("test" if "test" in arguments else "val")
    with pytest.raises(ConfigError, match=r"has an empty test split.*--split 98,1,1"):
        run("--evaluation.split", "test")
