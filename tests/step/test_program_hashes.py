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


def compare(*words: str) -> None:
    """Run the program apart: these tests' own settings, such as precision, are in the text."""
    command = [sys.executable, "-m", "tests.step.program_hashes", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@of_this_jax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_program_is_the_recorded_one():
    compare()


@of_this_jax
def test_some_programs_are_the_recorded_ones():
    compare("--only", "tensor, sequence", "pipeline, virtual, zero 3", "windows")


def test_every_program_is_recorded():
    assert [name for name, *_ in program_hashes.programs()] == list(RECORDED["programs"])


def test_a_changed_program_is_seen(tmp_path):
    fields = programs.TINY | programs.CPU["fsdp"]
    same = [program_hashes.lowered(fields, "train", cuda=False) for _ in range(2)]
    other = program_hashes.lowered(fields | {"model.norm_eps": 2e-5}, "train", cuda=False)
    assert same[0] == same[1] != other
