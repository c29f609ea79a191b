"""A measurement that repeats the routing of a run."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from jaxpar.commands import call, read
from jaxpar.config import ConfigError
from jaxpar.monitoring.routing import file_of, read_routing
from jaxpar.tools.bench.command import config_of

pytestmark = pytest.mark.usefixtures("quick_compile")

WITH_EXPERTS = ["--model.num-layers", "1", "--train.log-every", "1"]


@pytest.fixture
def config_file(config_file, tmp_path) -> str:
    """A config file whose layers have four experts."""
    file = tmp_path / "experts.py"
    text = Path(config_file).read_text("utf-8").replace("def get_config", "def dense")
    experts = "Experts(expert=Glu(64), num_experts=4, experts_per_token=2)"
    change = f'{{"model.layers.feed_forward": {experts}}}'
    file.write_text(f"{text}\ndef get_config():\n    return replace(dense(), **{change})\n")
    return str(file)


@pytest.mark.slow  # quicker: meshes/test_recorded_routing.py
def test_a_benchmark_repeats_what_a_run_recorded(
    only_devices, config_file, train_on, tmp_path, monkeypatch
):
    """Its loads are those of the recorded step, in every step, and its card says so."""
    folder, card = tmp_path / "run", tmp_path / "card.json"
    alone = ["--train.num-steps", "3", "--checkpoint.every", "0", "--evaluation.every", "0"]
    record = ["--run.dir", str(folder), "--run.record-routing", "3"]
    train_on(1, config_file, *WITH_EXPERTS, *alone, *record)
    file = folder / file_of(3)
    assert list(file.parent.iterdir()) == [file]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["recorded_routing"] == {
        "files": [file_of(3)],
        "bytes_of_each_uncompressed": 8 * 32 * 2,
    }
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    command = ["--bench", config_file, *WITH_EXPERTS, "--steps", "2", "--profile-steps", "0"]
    with only_devices(1), contextlib.redirect_stdout(io.StringIO()) as said:
        assert call("profile", [*command, "--routing", str(file), "--card", str(card)]) == 0
    experts = json.loads(card.read_text())["experts"]
    assert experts["fullest_expert"] == dict.fromkeys(
        ("median", "least", "most"), pytest.approx(last["fullest_expert"])
    )
    cfg = config_of(read("profile", ["--bench", config_file, *WITH_EXPERTS]))
    routing = read_routing("--routing", str(file), cfg)
    assert routing.step == 3 and experts["routing"] == str(routing)
    assert f"routing replayed: {routing.sha256[:12]}, step 3" in said.getvalue()


def test_a_benchmark_records_nothing(config_file):
    words = ["--bench", config_file, *WITH_EXPERTS, "--run.record-routing", "3"]
    with pytest.raises(ConfigError, match="record_routing = '3': has no effect: a benchmark"):
        call("profile", words)


def test_a_file_is_checked_before_anything_starts(config_file, tmp_path):
    words = ["--bench", config_file, *WITH_EXPERTS, "--routing", str(tmp_path / "none.npz")]
    with pytest.raises(ConfigError, match=r"--routing = .*cannot be read"):
        call("profile", words)
