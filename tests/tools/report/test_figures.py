"""Figures that people compare runs by, against cases computed by hand."""

import json
from datetime import datetime

import pytest

from jaxpar.commands import call
from jaxpar.tools.report import listing
from jaxpar.tools.report.page import page
from jaxpar.tools.report.runs import read_run
from jaxpar.tools.report.series import held_out_text
from tests.tools.report.folders import write_lines

TOKENS = 240


def make(folder, records, *, path="data/text", vocab=264, **sections):
    """A run's folder, without training."""
    folder.mkdir(parents=True)
    config = {
        "train": {"num_steps": 25},
        "data": {"path": path},
        "model": {"vocab_size": vocab},
    } | sections
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", records)
    return str(folder)


def timed(step, seconds, devices, **more):
    rate = TOKENS / seconds
    return {
        "step": step,
        "loss": 2.0,
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / devices,
        "tokens_seen": TOKENS * step,
    } | more


def text_of(folder):
    """The report's text, without tags."""
    made = page([read_run(folder)], datetime.now().astimezone()).decode()
    parts = made.replace("<", "\n<").splitlines()
    return " ".join(part.partition(">")[2].strip() for part in parts)


def resumed_on_fewer_devices():
    """20 steps of 1 s on 8 devices, 5 of 4 s on 2: 30 tokens/s/device in every record."""
    return [
        {"predicted_step_seconds": 1.1},
        *(timed(step, 1.0, 8) for step in range(1, 21)),
        {"resumed_after_step": 20},
        {"predicted_step_seconds": 5.0},
        *(timed(step, 4.0, 2) for step in range(21, 26)),
    ]


def test_throughput_and_step_time_of_a_run_resumed_on_fewer_devices(tmp_path, capsys):
    folder = make(tmp_path / "runs/h", resumed_on_fewer_devices())
    speed = read_run(folder).speed
    assert speed.throughput == 30.0
    assert speed.step_time == pytest.approx(4.0) and speed.devices == 2
    shown = text_of(folder)
    assert "throughput 30 tokens/s/device, median" in " ".join(shown.split())
    assert "step time 4 s median on 2 devices" in " ".join(shown.split())
    call("report", ["--list", str(tmp_path / "runs"), "--json"])
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["tokens_per_second_per_device"] == 30.0  # the report's


def test_a_prediction_is_compared_with_the_steps_that_it_was_made_for(tmp_path):
    shown = " ".join(text_of(make(tmp_path / "h", resumed_on_fewer_devices())).split())
    assert "step time, s 5 4 +25.0%" in shown


def test_another_mesh_of_as_many_devices_is_another_layout_if_it_was_predicted(tmp_path):
    records = [
        {"predicted_step_seconds": 1.0},
        *(timed(step, 1.0, 4) for step in range(1, 11)),
        {"resumed_after_step": 10},
        {"predicted_step_seconds": 2.0},
        *(timed(step, 2.0, 4) for step in range(11, 13)),
    ]
    speed = read_run(make(tmp_path / "h", records)).speed
    assert speed.step_time == pytest.approx(2.0)
    assert speed.throughput == pytest.approx(60.0)  # the median of ten of 60 and two of 30


def test_steps_of_another_size_are_another_layout(tmp_path):
    small = {"global_batch_size": 8, "seq_len": 30}
    records = [timed(step, 1.0, 2, **small) for step in range(1, 9)]
    records += [timed(9, 3.0, 2, **small | {"global_batch_size": 24})]
    assert read_run(make(tmp_path / "h", records)).speed.step_time == pytest.approx(3.0)


def last(loss, **more):
    return [{"step": 25, "loss": loss + 0.1, "held_out_loss": loss} | more]


def names(tmp_path):
    found = [read_run(str(path)) for path in listing.find_runs(tmp_path, lambda *_: None)]
    return [summary.name.rpartition("/")[2] for summary in listing.summaries(found)]


def test_runs_with_several_tokenizers_are_ranked_by_bits_per_byte(tmp_path, capsys):
    make(tmp_path / "bytes", last(1.25, bits_per_byte=1.80), path="data/bytes")
    make(tmp_path / "bpe", last(3.10, bits_per_byte=1.05), path="data/bpe", vocab=8192)
    assert names(tmp_path) == ["bpe", "bytes"]
    call("report", ["--list", str(tmp_path)])
    assert "do not compare" not in capsys.readouterr().out


def test_runs_that_do_not_compare_are_ranked_apart(tmp_path, capsys):
    """Without the bytes of the text, a loss per token says nothing about other tokens."""
    make(tmp_path / "a1", last(1.30), path="data/a")
    make(tmp_path / "a2", last(1.20), path="data/a")
    make(tmp_path / "b1", last(3.00), path="data/b", vocab=8192)
    make(tmp_path / "b2", last(0.50), path="data/b", vocab=8192)
    make(tmp_path / "pairs", last(0.01), path="data/b", vocab=8192, dpo={"beta": 0.1})
    assert names(tmp_path) == ["a2", "a1", "b2", "b1", "pairs"]
    call("report", ["--list", str(tmp_path)])
    out = capsys.readouterr().out
    assert "do not compare" in out
    assert out.count("ranked by held-out loss on") == 3


def test_of_the_same_tokens_nats_and_bits_give_one_order(tmp_path):
    for name, loss in (("x", 2.0), ("y", 1.0), ("z", 1.5)):
        make(tmp_path / name, last(loss, bits_per_byte=loss * 0.4))
    make(tmp_path / "new", [{"step": 1, "loss": 0.5}])  # not evaluated yet
    assert names(tmp_path) == ["y", "z", "x", "new"]


def test_a_held_out_set_that_runs_share_makes_them_comparable():
    one = {"data": {"path": "data/a", "held_out": "data/val"}, "model": {"vocab_size": 264}}
    other = {"data": {"path": "data/b", "held_out": "data/val"}, "model": {"vocab_size": 264}}
    assert held_out_text(one) == held_out_text(other)
    assert held_out_text(one) != held_out_text(one | {"model": {"vocab_size": 272}})


@pytest.mark.parametrize("config", [{}, {"data": 3}, {"data": None, "model": []}])
def test_a_config_of_another_shape_has_a_text(config):
    assert "unknown data" in held_out_text(config)
