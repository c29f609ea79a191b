"""The report's section about the profile of a run, on the piece of a real trace."""

import json
import shutil
from pathlib import Path

from jaxpar.tools.report import facts
from tests.tools.report.folders import write_run
from tests.tools.report.test_page import EVIL, Tags, page_of

PIECE = Path(__file__).parents[1] / "profiling" / "fsdp4.xplane.pb.gz"
FACTS = {
    **{"first_step": 20, "num_steps": 2, "processes": 1, "devices": 2, "mesh": "data=2"},
    **{"device_kind": "NVIDIA H200", "tokens": 64, "flops": 1e9, "attention_flops": None},
    **{"memory": {}, "versions": {}},
}


def run_with_profile(folder: Path, step: int = 20) -> Path:
    """A run with the piece as the profile of a step."""
    run = write_run(folder)
    where = run / "profiles" / f"step_{step:08d}"
    where.mkdir(parents=True)
    shutil.copy(PIECE, where / "process_0.xplane.pb.gz")
    (where / "profile.json").write_text(json.dumps(FACTS))
    hlo = PIECE.with_name("fsdp4.hlo.txt.gz")
    shutil.copy(hlo, where / "step.hlo.txt.gz")
    return run


def test_the_profile_of_a_run(tmp_path):
    run = run_with_profile(tmp_path / "run")
    text = " ".join(Tags(page_of(run)).texts)
    assert "Profile of a step" in text and "Steps 20 to 21: step 72.0 ms" in text
    assert "Tensor cores: 87.8% of the step." in text
    assert "feed_forward" in text
    assert f"More: python -m jaxpar.profile {run} --step 20" in text


def test_a_run_without_profiles(tmp_path):
    assert "Profile of a step" not in page_of(write_run(tmp_path / "run"))


def test_profiles_that_are_not_read(tmp_path, monkeypatch):
    run = run_with_profile(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(facts, "MAX_BYTES", 1000)
        assert "the profile of step 20 is large; to read it: python" in page_of(run)
    (run / "profiles/step_00000020/process_0.xplane.pb.gz").write_bytes(EVIL.encode() * 9)
    text = page_of(run)
    assert "the profile of step 20 cannot be read" in text and "<script>alert" not in text
