"""Files from strangers, damaged at random: every program tells it in one line, and needs little."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from tests.e2e import damage, strangers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1800)
@pytest.mark.slow  # quicker: test_declared_formats.py, and tests of each reader
@pytest.mark.parametrize("count", [1, 200])
def test_no_damaged_file_is_a_traceback(count):
    """Each kind `count` times, in one process with a limit of memory; the same ones each time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.strangers", str(count)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    faults = json.loads(done.stdout.splitlines()[-1])
    assert not faults, "\n".join(f"{kind} {why}" for kind in faults for why in faults[kind])


def raising(error: BaseException):
    def read(_):
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda _: 0, ""),
        (lambda _: None, ""),
        (lambda _: 2, ""),
        (raising(ConfigError("a", 1, "must", "do")), ""),
        (lambda _: 1, "code 1"),
        (raising(KeyError("a")), "KeyError: 'a'"),
        (raising(MemoryError()), "MemoryError"),
        (raising(SystemExit(1)), "SystemExit: 1"),
    ],
)
def test_a_fault_is_seen(read, said, tmp_path):
    why = strangers.fault(strangers.Kind("x", damage.of_bytes, read), tmp_path)
    assert said in why if said else why == ""


def test_damage_is_of_every_kind_and_the_same_each_time():
    good = json.dumps({"a": [1, {"b": "c"}], "d": {"e": 2.5}}).encode()
    of = lambda seed: damage.of_json(good, random.Random(seed))  # noqa: E731
    made = [of(str(seed)) for seed in range(300)]
    assert made == [of(str(seed)) for seed in range(300)]
    assert len(set(made)) > 150
    for part in (b"NaN", b"Infinity", b"[" * 2000, b"9" * 5000, b"\\ud800", b"1e+308", b"null"):
        assert any(part in text for text in made), part
