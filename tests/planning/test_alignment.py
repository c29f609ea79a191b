"""Sizes that GPUs multiply slowly get a hint."""

import re

import pytest

from jaxpar.config import Config, replace
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.planning.startup import alignment_hints

ALIGNED = {"model.d_model": 4096, "model.d_ff": 14336, "model.vocab_size": 128256}


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"model.vocab_size": 50257}, "vocab_size = 50,257: multiples of 8 .*, such as 50,304"),
        ({"model.d_ff": 11007}, "d_ff = 11,007: multiples of 8 .*, such as 11,008"),
        ({"model.d_model": 4095}, "d_model = 4,095: .*, such as 4,096"),
        (
            {"model.d_ff": 11040, "parallel.tensor": 8},
            "d_ff = 11,040, 1,380 on a device: .* such as 11,264",
        ),
        ({"compute.matmul_dtype": "float8", "model.d_ff": 14408}, "multiples of 16 .* 14,464"),
        ({"compute.dtype": "float32", "model.d_ff": 14350}, "multiples of 4 .* 14,368"),
    ],
)
def test_an_odd_size_gets_a_hint(fields, hint):
    (line,) = alignment_hints(replace(Config(), **ALIGNED | fields))
    assert re.search(hint, line)


@pytest.mark.parametrize("name", known_configs().split(", "))
def test_our_configs_need_none(name):
    assert alignment_hints(load_config(name)) == []
