"""What a report reads: in bounded memory, extremes kept, steps counted once, torn lines."""

import json
import math
import random
import tracemalloc

import pytest

from jaxpar.config import ConfigError
from jaxpar.monitoring.outline import outline
from jaxpar.runtime.files import json_lines
from jaxpar.tools.report.charts import page_data
from jaxpar.tools.report.runs import read_run
from jaxpar.tools.report.series import RANGES, RATIO, Series, Sizes
from tests.tools.report.folders import TOKENS, record, write_lines, write_run


def test_few_values_are_kept_as_they_are_and_of_many_the_extremes():
    few, many = Series(0, 100, 1), Series(0, 100_000, 1)
    for step in range(10, 101, 10):
        few.add(step, step / 7)
    assert [(p.step, p.mean, p.low, p.high) for p in few.points()] == [
        (s, s / 7, s / 7, s / 7) for s in range(10, 101, 10)
    ]
    noise = random.Random(0)
    values = {step: noise.random() for step in range(1, 100_001)}
    values[54_321] = -9.0
    for step, value in values.items():
        many.add(step, value)
    points = many.points()
    assert len(points) == RANGES and points[-1].step == 100_000
    assert min(p.low for p in points) == -9.0 and max(p.high for p in points) == max(
        values.values()
    )
    first = [values[s] for s in range(1, points[0].step + 1)]
    assert points[0].mean == pytest.approx(sum(first) / len(first))


def test_the_exponential_mean_is_that_of_its_definition():
    series, mean = Series(0, 200, 10), 0.0
    for step in range(1, 201):
        series.add(step, step**2)
        mean = 0.9 * mean + 0.1 * step**2 if step > 90 else series.points()[-1].smooth
    assert series.points()[-1].smooth == pytest.approx(mean)
    assert [p.smooth for p in series.points()[:2]] == [1, pytest.approx(1 + 3 / 1.1)]


def test_quantiles_and_bars_are_those_of_the_values():
    sizes, noise = Sizes(), random.Random(0)
    values = sorted(noise.lognormvariate(0, 1) for _ in range(10_000))
    for value in values:
        sizes.add(value)
    for share in (0.1, 0.5, 0.99):
        exact = values[math.ceil(share * len(values)) - 1]
        assert sizes.quantile(share) == pytest.approx(exact, rel=RATIO - 1)
    edges, counts = sizes.bars(20)
    assert sum(counts) == len(values) == len(sizes) and len(edges) == 21
    below = sum(value < edges[3] for value in values)
    assert sum(counts[:3]) == pytest.approx(below, rel=0.05)


def test_a_step_that_was_taken_again_counts_once(tmp_path):
    run = read_run(str(write_run(tmp_path / "run")))
    points = run.series["loss"].points()
    assert [p.step for p in points] == list(range(1, 201))
    assert max(p.high for p in points if p.step > 10) < 10  # 50 in what was taken again
    assert [p.step for p in run.series["held_out_loss"].points()] == [160, 180, 200]
    assert run.tokens_per_step == TOKENS and run.predicted["predicted_memory_gib"] == 42.0


def test_what_happened_is_marked(tmp_path):
    run = read_run(str(write_run(tmp_path / "run")))
    marks = {mark.kind: mark for mark in run.marks}
    assert {kind: mark.step for kind, mark in marks.items()} == {
        "skipped": 156,
        "saved": 150,
        "restart": 150,
    }
    assert marks["skipped"].text == "2 updates skipped up to step 156"
    (first, second), hours = run.progress, marks["restart"].hours
    assert [step for _, step in first] == [0, 150, 160] and second[0] == (hours, 150)
    assert hours == pytest.approx((3600 + 20) / 3600, rel=0.01)  # it was down for most of it
    assert run.goodput.attempts == 2 and run.goodput.seconds["lost work"] == pytest.approx(5)


def test_an_attempt_that_waited_for_the_one_before_goes_on_where_that_ended(tmp_path):
    """Born 60 seconds before the first's last event: of its age, these are within the first."""
    folder = write_run(tmp_path / "run")
    file = folder / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    first = next(e for e in events[::-1] if e["attempt"] == 1)
    for event in events:
        if event["attempt"] == 2:
            event["age"], since = event["age"] + 100, event["age"]
            event["time"] = first["time"] + 40 + since
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    run = read_run(str(folder))
    hours = next(mark.hours for mark in run.marks if mark.kind == "restart")
    assert hours * 3600 == pytest.approx(first["age"] - 60 + 120)
    assert run.goodput.total == pytest.approx(first["age"] - 60 + events[-1]["age"])


def test_a_rewind_is_no_restart(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "events.jsonl").read_text().splitlines()
    back = json.loads(lines[2]) | {"event": "from", "step": 40}
    (folder / "events.jsonl").write_text(
        "\n".join([*lines[:4], json.dumps(back), *lines[4:]]) + "\n"
    )
    marks = read_run(str(folder)).marks
    assert [(m.kind, m.step) for m in marks if m.kind in ("rewind", "restart")] == [
        ("rewind", 40),
        ("restart", 150),
    ]


def test_a_start_from_scratch_replaces_all_before(tmp_path):
    file, noise = tmp_path / "metrics.jsonl", random.Random(0)
    write_lines(file, (record(step, noise, loss=1.0) for step in range(10, 60, 10)))
    write_lines(file, (record(step, noise, loss=2.0) for step in range(10, 40, 10)))
    run = read_run(str(tmp_path))
    assert [(p.step, p.mean) for p in run.series["loss"].points()] == [(10, 2), (20, 2), (30, 2)]
    assert [(m.kind, m.step) for m in run.marks] == [("restart", 9)]


def test_torn_lines_and_lines_still_being_written(tmp_path):
    file, noise = tmp_path / "metrics.jsonl", random.Random(0)
    write_lines(file, (record(step, noise, loss=1.0) for step in range(1, 10)))
    with open(file, "a") as torn:
        torn.write('{"step": 10, "lo' + json.dumps({"resumed_after_step": 7}) + "\n")
    write_lines(file, (record(step, noise, loss=2.0) for step in range(8, 12)))
    with open(file, "a") as torn:
        torn.write('{"step": 12, "loss": 3.')
    run = read_run(str(tmp_path))
    means = {p.step: p.mean for p in run.series["loss"].points()}
    assert means == {s: 1.0 for s in range(1, 8)} | {s: 2.0 for s in range(8, 12)}


def test_a_line_without_an_end_is_passed_over_in_pieces(tmp_path):
    """Zeros that a crash has left, or a file from a stranger: the lines around them count."""
    file, size = tmp_path / "metrics.jsonl", json_lines.MAX_LINE_BYTES
    write_lines(file, [{"step": 1, "loss": 2.0}])
    with open(file, "ab") as appended:
        appended.write(bytes(2 * size + 5) + b"\n")
    write_lines(file, [{"step": 2, "loss": 1.5}])
    tracemalloc.start()
    found = outline(file)
    assert [record["step"] for record in found.records()] == [1, 2]
    assert found.last_step == 2
    assert tracemalloc.get_traced_memory()[1] < 5 * size
    tracemalloc.stop()


def test_what_is_written_after_the_first_pass_waits_for_the_next_report(tmp_path):
    file, noise = tmp_path / "metrics.jsonl", random.Random(0)
    write_lines(file, [record(1, noise)])
    found = outline(file)
    write_lines(file, [record(2, noise)])
    assert [r["step"] for r in found.records()] == [1]


def test_losses_that_are_no_numbers_are_passed_over(tmp_path):
    file, noise = tmp_path / "metrics.jsonl", random.Random(0)
    losses = [1.0, math.nan, 2.0]
    write_lines(file, (record(s, noise, loss=x) for s, x in enumerate(losses, 1)))
    write_lines(file, [{"step": 4, "loss": math.nan, "grad_norm": math.inf}])  # as JSON's NaN
    damaged = ("three", 10**30, -4, 1.5, None, [1])
    write_lines(file, [{"step": step, "loss": 9.0} for step in damaged])
    write_lines(file, [{"step": 5, "loss": "x"}, {"step": 6, "loss": [1]}, [1, 2], 5])
    points = read_run(str(tmp_path)).series["loss"].points()
    assert [(p.step, p.mean) for p in points] == [(1, 1.0), (3, 2.0)]


@pytest.mark.slow
def test_many_lines_take_no_more_memory_than_a_few(tmp_path):
    line = json.dumps(record(123_456, random.Random(0)))
    file = tmp_path / "metrics.jsonl"
    with open(file, "w") as lines:
        lines.writelines(line.replace("123456", str(s)) + "\n" for s in range(1, 8_001))
    tracemalloc.start()
    run = read_run(str(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.last_step == 8_000 and len(run.series["loss"].points()) == RANGES
    assert peak < 2e6 < 2.5e6 < file.stat().st_size


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "neither config.json nor metrics.jsonl"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, rule):
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match=rule):
        read_run(str(tmp_path / "x"))


def test_runs_within_a_folder_are_named(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"Fix: use {tmp_path}/run\."):
        read_run(str(tmp_path))


def test_a_damaged_config_is_named(tmp_path):
    for text, rule in (("{", "is not valid JSON"), ('{"train": 5}', "train is not a section")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"config\.json.*{rule}"):
            read_run(str(tmp_path))


def test_tokens_of_steps_of_several_sizes(tmp_path):
    """Between records on a straight line; without sizes, every step counts the same."""
    folder = write_run(tmp_path / "run", steps=40)
    seen = [(step + 2 * max(step - 20, 0)) * TOKENS for step in range(41)]
    sizes = {"global_batch_size": 8, "seq_len": 64}
    more = {step: sizes | {"tokens_seen": tokens} for step, tokens in enumerate(seen)}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = (json.dumps(line | more.get(line.get("step"), {})) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text("".join(text))
    run, plain = read_run(str(folder)), read_run(str(write_run(tmp_path / "plain", steps=40)))
    for step in (0, 1, 20, 21, 40):
        assert run.tokens_at(step) == pytest.approx(seen[step])
        assert plain.tokens_at(step) == pytest.approx(step * TOKENS)
    (drawn,) = page_data([run])["runs"]
    assert drawn["tokens"][0][-1] == 40 and drawn["tokens"][1][-1] == seen[40]
    assert "tokens" not in page_data([plain])["runs"][0]
