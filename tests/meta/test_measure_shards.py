"""The measurements of checkpoints of many shards and of contested leases work, on a few."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ROOT = Path(__file__).resolve().parents[2]


def measured(script: str, *words: str) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "measure" / script), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_shards_are_saved_and_read():
    said = measured("many_shards.py", "--devices", "16", "--arrays", "2")
    saved, read = (json.loads(line) for line in said)
    assert saved["devices"] == 16 and saved["shards"] == 32
    assert saved["largest"]["_sharding"] > 16 * 2 * 10
    assert read["equal arrays"] == 2


def test_one_contender_has_the_lease():
    pytest.importorskip("moto")
    said = measured("leases.py", "--contenders", "16")
    assert len(said) == 2 and all('"held": 1, "refused": 15' in line for line in said)
