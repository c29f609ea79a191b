"""The soak program itself, on a small part of what `make soak` does."""

import subprocess
import sys

import pytest

from tests import ranks
from tests.e2e import soak_kills


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_part_of_the_soak(tmp_path):
    small = {"SOAK_PART": "20/162", "SOAK_KILLS": "2", "SOAK_RUNS": "1"}
    env = ranks.environment(**small, SOAK_OUT=str(tmp_path / "table"))
    done = subprocess.run([sys.executable, "-m", "tests.e2e.soak"], env=env, cwd=ranks.ROOT)
    table = (tmp_path / "table").read_text()
    assert done.returncode == 0, table
    assert "2 of 2 pairs go on" in table and "2 kills with 4 processes" in table
    assert "# 0 failed" in table


def test_a_phase_is_told_by_what_was_said(tmp_path):
    said = ""
    for phase, words in soak_kills.SAYS.items():
        said += (words if isinstance(words, str) else words[0]) + "..."
        assert soak_kills.phase_of(said, tmp_path) == phase
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    assert soak_kills.phase_of(said, tmp_path) == "save"
    assert soak_kills.phase_of("", tmp_path) == "start"
