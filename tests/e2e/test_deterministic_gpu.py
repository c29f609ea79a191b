"""With `run.deterministic`, two runs on the same GPUs have the same bits in every array."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import read_saved, saved_steps

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus, pytest.mark.waits]

ROOT = Path(__file__).resolve().parents[2]

MODEL = """llama_1b --model.num-layers 2 --train.num-steps 6 --train.global-batch-size 8
--optimizer.warmup-steps 2 --run.deterministic True --checkpoint.every 3 --checkpoint.keep 3
--evaluation.every 0""".split()


def program(*words: str | Path) -> None:
    """Run a program of jaxpar on all GPUs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": ""}
    subprocess.run([sys.executable, "-m", *words], env=environment, check=True, timeout=600)


@pytest.mark.timeout(900)
def test_two_runs_save_the_same_bits(tmp_path):
    text, runs = tmp_path / "text", [tmp_path / name for name in ("first", "second")]
    program(
        *("jaxpar.data", "prepare", "--input", "stdlib", "--output", text, "--tokenizer", "bytes")
    )
    for run in runs:
        program("jaxpar.train", *MODEL, "--data.path", text, "--run.dir", run)
    for step in (3, 6):
        first, second = (read_saved(run, step).fingerprints for run in runs)
        assert first and first == second, f"step {step}"
    assert [saved_steps(run) for run in runs] == [[3, 6]] * 2
