"""Loads of experts in the records: at logged steps, few of them, and again after a resume."""

import json

import numpy as np

from jaxpar.config import Config, replace
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.routing import LOADS_FILE, LoadsWriter
from tests.tiny import EXPERTS, GLU, TINY

CFG = replace(
    TINY,
    **{"model.layers.feed_forward": EXPERTS, "train.num_steps": 7, "train.log_every": 3},
)


def records_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / LOADS_FILE).read_text().splitlines()]


def train(cfg: Config, folder, steps: range) -> None:
    """Log steps whose loads have the step in them."""
    with MetricsWriter(cfg, folder, steps.start, lambda step: 0.5) as writer:
        for step in steps:
            rows = np.array([[step, 3.0], [2.0, 2.0]], np.float32)
            measured = {"loss": np.float32(1.0), "grad_norm": np.float32(1.0), "expert_rows": rows}
            writer.write_previous(step, measured, 0.0)
        writer.flush()


def test_logged_steps_are_written(devices, tmp_path):
    train(CFG, tmp_path, range(7))
    found = records_of(tmp_path)
    assert [(r["step"], r["loads"]) for r in found] == [
        (step, [[step - 1, 3], [2, 2]]) for step in (3, 6, 7)
    ]
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert "expert_rows" not in metrics


def test_a_resumed_run_says_where_it_goes_on(devices, tmp_path):
    train(CFG, tmp_path, range(7))
    train(CFG, tmp_path, range(4, 7))
    assert records_of(tmp_path)[3] == {"resumed_after_step": 4}
    assert [r["step"] for r in records_of(tmp_path)[4:]] == [6, 7]


def test_a_long_run_writes_a_thousand_records(devices, tmp_path):
    cfg = replace(CFG, **{"train.num_steps": 100_000, "train.log_every": 10})
    writer = LoadsWriter(cfg, tmp_path, 0)
    for step in range(10, 100_001, 10):
        writer.write(step, np.ones((1, 2), np.float32))
    writer.close()
    assert [r["step"] for r in records_of(tmp_path)] == list(range(100, 100_001, 100))


def test_without_experts_there_is_no_file(devices, tmp_path):
    dense = replace(CFG, **{"model.layers.feed_forward": GLU})
    with MetricsWriter(dense, tmp_path, 0, lambda step: 0.5) as writer:
        writer.write_previous(2, dict(loss=1.0, grad_norm=1.0), 0.0)
        writer.flush()
    assert not (tmp_path / LOADS_FILE).exists()
