"""Runs whose schedules are tried by scripts/measure/schedules.py: what it finds, and the trial."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def schedules():
    name = "schedules"
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/measure/{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script
    spec.loader.exec_module(script)
    return script


def write_run(
    folder: Path, *, loss: float = 2.0, rows: int = 8, window: int = 0, last: int = STEPS
):
    """A run as far as it is compared, whose step 2 is repeated. Values are of step 3."""
    folder.mkdir()
    records, recent = [], []
    for step in (1, 2, *range(2, last + 1)):
        at_3 = step == 3
        record = {"step": step, "loss": loss if at_3 else 2.0, "grad_norm": 1.0}
        record |= {"global_batch_size": rows if at_3 else 8, "seq_len": 16, "learning_rate": 1e-3}
        records.append(record | {"tokens_seen": 128 * step, "num_tokens": 100, "epochs": [0.1]})
        windows = [8 * step + window * at_3, 8 * step + 8]
        bits = {"loss": "0", "grad_norm": "0"}
        recent.append(
            {
                "step": step,
                "batch": step - 1,
                "windows": windows,
                "seed": 0,
                "mesh": "",
                "loss": 2.0,
                "grad_norm": 1.0,
                "bits": bits,
            }
        )
    for name, lines in (("metrics.jsonl", records), ("recent.jsonl", recent)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"loss": 2.00001}, True),
        ({"loss": 2.1}, False),
        ({"rows": 16}, False),
        ({"window": 1}, False),
        ({"last": 3}, False),
    ],
)
def test_what_differs_is_found(change, same, schedules, tmp_path, capsys):
    whole, other = write_run(tmp_path / "whole"), write_run(tmp_path / "other", **change)
    assert schedules.compare("other", other, whole, STEPS, schedules.ROUNDING) == same
    assert ("DIFFERENT" in capsys.readouterr().out) == (not same)


@pytest.mark.waits
@pytest.mark.slow
def test_a_killed_and_moved_run_has_the_same_losses():
    script = [sys.executable, "scripts/measure/schedules.py", "--kills", "3", "--steps", "20"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "DIFFERENT" not in done.stdout and done.stdout.count("killed\n") == 4
