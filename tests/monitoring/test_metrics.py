"""Metrics: fetched one step late, written by interval; lines for people; bad numbers stop."""

import json
from types import SimpleNamespace

import pytest

from jaxpar.config import Config, replace
from jaxpar.monitoring import metrics
from jaxpar.monitoring.metrics import MetricsWriter, step_line

CFG = replace(
    Config(),
    **{"train.num_steps": 7, "train.log_every": 3, "train.global_batch_size": 2, "data.seq_len": 8},
)


def measured(loss: float) -> SimpleNamespace:
    """What a step returns."""
    return dict(loss=loss, grad_norm=1.0, num_tokens=16.0)


def records_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_intervals_and_the_last_step_are_written(devices, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 1000, 2))  # two seconds from fetch to fetch
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))
    with MetricsWriter(CFG, tmp_path, 0, lambda step: 0.5) as writer:
        for step in range(7):
            writer.write_previous(step, measured(step), data_wait=0.25)
        writer.flush()
    records = records_of(tmp_path)
    assert [r["step"] for r in records] == [3, 6, 7]
    assert [r["loss"] for r in records] == [2.0, 5.0, 6.0]
    assert [r["tokens_seen"] for r in records] == [48, 96, 112]
    assert all(r["step_seconds"] == 2.0 for r in records)
    assert all(r["tokens_per_second"] == 8.0 for r in records)
    assert capsys.readouterr().out.count("loss") == 3


def test_a_step_is_fetched_when_the_next_is_handed_over(devices, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(metrics.jax, "device_get", lambda values: fetched.append(values) or values)
    with MetricsWriter(CFG, tmp_path, 0, lambda step: 0.5) as writer:
        writer.write_previous(0, measured(10), 0.0)
        assert fetched == []
        writer.write_previous(1, measured(11), 0.0)
        assert [v["loss"] for v in fetched] == [10]
        writer.flush()
        assert [v["loss"] for v in fetched] == [10, 11]
        writer.flush()
        assert len(fetched) == 2


def test_a_pause_is_in_no_step_time(devices, tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 100.0, 101.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    with MetricsWriter(CFG, tmp_path, 0, lambda step: 0.5) as writer:
        for step in (0, 1):
            writer.write_previous(step, measured(1), 0.0)
        writer.pause()  # 99 seconds of something else
        for step in (2, 3):
            writer.write_previous(step, measured(1), 0.0)
    (record,) = records_of(tmp_path)
    assert record["step_seconds"] == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_null_in_the_records(bad, devices, tmp_path, capsys):
    seen = []
    look = lambda step, values: seen.append((step, values["loss"]))  # noqa: E731
    with MetricsWriter(CFG, tmp_path, 0, lambda step: step, None, look) as writer:
        numbers = measured(bad)
        numbers |= {"skipped": 2.0, "in_a_row": 1.0, "loss_scale": 1.0}
        writer.write_previous(5, numbers, 0.0)
        writer.flush()
    assert [step for step, _ in seen] == [5]
    (record,) = records_of(tmp_path)
    assert record["loss"] is None and record["skipped"] == 2
    assert record["learning_rate"] == 4.0  # one update was left out before this one
    assert "loss non-finite" in capsys.readouterr().out


def test_a_resumed_run_says_so_and_appends(devices, tmp_path):
    for first in (0, 3):
        with MetricsWriter(CFG, tmp_path, first, lambda step: 0.5) as writer:
            writer.write({"step": first})
    assert records_of(tmp_path) == [{"step": 0}, {"resumed_after_step": 3}, {"step": 3}]


def test_a_line_shows_what_is_known():
    record = dict(step=5, loss=2.5, learning_rate=3e-4, grad_norm=1.0, memory_gib=1.25)
    line = step_line(record, 100, left=95)
    assert line.startswith("step   5/100   loss 2.5000   lr 3.00e-04   grad norm 1.000")
    assert "tok/s" not in line and "MFU" not in line and "ETA" not in line
    record |= dict(tokens_per_second=9.0, tokens_per_second_per_device=4321.0, mfu=0.5)
    record |= dict(step_seconds=2.0)
    line = step_line(record, 100, left=95)
    assert "4,321 tok/s/device   MFU 50.0%" in line and line.endswith("ETA 3m10s")
