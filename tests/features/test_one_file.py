"""A feature of the step is one file: the tests' own, put beside those of the package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BEGIN = f"""
import jax, jaxpar.features
jaxpar.features.__path__.append({str(ROOT / "tests" / "features" / "one_file")!r})
jax.config.update("jax_num_cpu_devices", 4)
from jaxpar.config import replace
from tests.tiny import TINY
cfg = replace(TINY, **{{"lookahead.every": 2}})
"""

HELP = """
from jaxpar.config.serialize import from_json, to_json
from jaxpar.step.features import features_of
from jaxpar.step.state import abstract_state
from jaxpar.commands import call
assert from_json(to_json(cfg)) == cfg
assert [type(f).__name__ for f in features_of(cfg)] == ["Lookahead", "Guard"]
assert set(abstract_state(cfg).extra["lookahead"]) == set(abstract_state(cfg).params)
call("train", ["--help", "lookahead"])
"""

MESHES = """
from jaxpar.certification.small_config import steady
from tests.meshes.test_experts import compare
for mesh in ("data=2,tensor=2", "pipeline=2,num_microbatches=2,data=2,zero=1"):
    found = compare(mesh, steady(cfg), jax.devices(), steps=2)
    assert found.update is not None and not found.mismatches(), mesh
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_fields_have_help_and_its_state_is_that_of_the_run():
    assert "--lookahead.every INT       Steps between returns. (default: 5)" in run(HELP)


@pytest.mark.slow
def test_it_trains_on_meshes():
    run(MESHES)
