"""scripts/measure/offload.py, without running a step."""

import pytest

from jaxpar.config import replace
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from scripts.measure import offload as measure


@pytest.mark.parametrize("kind", measure.KINDS)
@pytest.mark.parametrize("small", [{}, measure.SMALL], ids=["", "small"])
def test_each_kind_is_a_config(kind, small):
    fields = measure.FIELDS | small | measure.KINDS[kind]
    cfg = resolve(replace(load_config("llama_1b"), **fields), 1)
    assert cfg.optimizer.offload == ("host" in kind)


def test_a_kind_that_fails_has_its_error_in_the_table():
    assert measure.line_of("adamw", {"error": "no memory"}).split() == [
        "adamw", "failed:", "no", "memory"
    ]  # fmt: skip
