"""The comparison of optimizers, by scripts/measure/optimizers.py."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script():
    name = "optimizers"
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/measure/{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def write_run(folder: Path, losses: dict[int, float], seconds: float) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": s, "held_out_loss": loss}) for s, loss in losses.items()]
    lines.insert(1, json.dumps({"step": 1, "step_seconds": seconds}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "held_o']))
    return folder


def test_a_rule_is_one_row_with_its_mean_and_its_lead(script, tmp_path):
    adamw = [
        write_run(tmp_path / f"a{i}", {10: 5.0, 20: 4.0 + i / 10, 40: 3.0 + i / 10}, 0.5)
        for i in range(3)
    ]
    muon = [write_run(tmp_path / "m", {10: 4.0, 20: 3.05, 40: 2.5}, 0.6)]
    rows = script.table_of({("adamw", "1e-3"): adamw, ("muon", "1e-3"): muon})[2:]
    assert rows[0] == "| adamw | 1e-3 | 3 | 3.1000 | 0.1000 | 0.5000 | 100% |"
    assert rows[1] == "| muon | 1e-3 | 1 | 2.5000 | - | 0.6000 | 50% |"


def test_the_lead_is_over_the_best_rate_of_the_first_rule(script, tmp_path):
    runs = {
        (rule, rate): [write_run(tmp_path / f"{rule}{rate}", {10: 4.0, 20: last}, 0.5)]
        for rule, rate, last in [("adamw", "1e-3", 3.5), ("adamw", "2e-3", 3.0), ("muon", "1", 3.2)]
    }
    assert script.best_rates(runs) == {"adamw": "2e-3", "muon": "1"}
    assert [row.split(" | ")[-1] for row in script.table_of(runs)[2:]] == [
        "never |",
        "100% |",
        "never |",
    ]
    drawn = script.picture(runs, "llama").decode()
    assert "adamw, rate 2e-3" in drawn and "muon, rate 1:" in drawn and "Held-out loss" in drawn


def test_a_loss_that_is_not_reached(script):
    assert script.first_as_low({10: 5.0, 20: 4.0}, 3.9) is None
    assert script.mean_curve([{1: 2.0, 2: 1.0}, {1: 4.0}]) == {1: 3.0}
