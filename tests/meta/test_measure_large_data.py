"""A start costs as much with 1e12 tokens as with 1e10, and random reads read what is used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.waits, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def test_starts_and_batches_cost_nothing_per_token():
    script = ROOT / "scripts" / "measure" / "large_data.py"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *sparse, cold = map(json.loads, done.stdout.splitlines())
    assert [one["tokens"] for one in sparse] == [10**10, 10**11, 10**12]
    for one in sparse:
        assert one["start_cpu"] < 2 and one["memory_mb"] < 300, one
        # 40 ms on an idle machine: beside other programs, the same work takes more CPU time.
        assert one["batch_cpu"] < 0.08, one
    small, large = sparse[0], sparse[-1]
    assert large["memory_mb"] < small["memory_mb"] + 50
    assert large["start_cpu"] < small["start_cpu"] + 0.5
    assert 0 < cold["read_ratio"] < 2
