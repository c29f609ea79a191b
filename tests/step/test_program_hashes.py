"""A change of structure changes no lowered program: the hashes that `program_hashes.py` records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.step import program_hashes, programs

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(program_hashes.TABLE.read_text("utf-8"))

of_this_jax = pytest.mark.skipif(
    RECORDED["jax"] != jax.__version__, reason=f"hashes were recorded with JAX {RECORDED['jax']}"
)


@of_this_jax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_program_is_the_recorded_one():
    """Apart, as the table is written."""
    command = [sys.executable, "-m", "tests.step.program_hashes"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@pytest.fixture
def as_recorded():
    """Without these tests' precision, which is in the text."""
    with jax.default_matmul_precision(None):
        yield


@of_this_jax
@pytest.mark.parametrize("name", ["tensor, sequence", "pipeline, virtual, zero 3", "windows"])
def test_some_programs_are_the_recorded_ones(name, as_recorded):
    text = program_hashes.lowered(programs.TINY | programs.CPU[name], "train", cuda=False)
    assert program_hashes.digest_of(text) == RECORDED["programs"][name]


def test_every_program_is_recorded():
    assert [name for name, *_ in program_hashes.programs()] == list(RECORDED["programs"])


@of_this_jax
def test_a_changed_program_is_seen(as_recorded):
    fields = programs.TINY | programs.CPU["fsdp"]
    other = program_hashes.lowered(fields | {"model.norm_eps": 2e-5}, "train", cuda=False)
    digest = program_hashes.digest_of(other)
    assert digest != RECORDED["programs"]["fsdp"]
