"""The measurement of thousands of devices works, on a few."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "measure" / "thousands.py"


def measured(*words: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_processes_exchange_and_contend():
    said = measured("exchange", "--processes", "4")
    assert re.search(r"^4 processes: connect .* exchange .* check_same .* any_process", said)


@pytest.mark.slow
def test_one_contender_wins():
    said = measured("locks", "--contenders", "16")
    assert "'won': 1, 'refused': 15" in said


@pytest.mark.slow
def test_the_first_and_the_last_process_of_four_hosts_have_the_same_program(tmp_path):
    """Each host is a slice to JAX, as real ones are."""
    import numpy as np

    np.arange(4096, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(4096, dtype=np.uint16).tofile(tmp_path / "val.bin")
    data = ("--data.path", str(tmp_path), "--model.vocab-size", "4096", "--data.seq-len", "64")
    mesh = ("--train.global-batch-size", "DEVICES", "--parallel.replica", "PROCESSES")
    data = (*data, "--data.document-mask", "False")  # these tokens have no documents
    said = measured("start", "--devices", "32", *data, *mesh, "--parallel.data", "8")
    programs = re.findall(r"32 devices, process (\d): program (\w+)", said)
    assert [rank for rank, _ in programs] == ["0", "3"]
    assert programs[0][1] == programs[1][1]
