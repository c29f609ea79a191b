"""The report as a file: nothing in a run can become markup, nothing is loaded, all is written."""

import json
import math
import os
import random
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError, Source
from jaxpar.monitoring.goodput import PARTS
from jaxpar.monitoring.metric_names import TABLE_FILE
from jaxpar.monitoring.samples import write_sample
from jaxpar.tools.report import command as program
from jaxpar.tools.report.command import report
from jaxpar.tools.report.options import ReportOptions
from jaxpar.tools.report.runs import MAX_SERIES, read_run
from tests.tools.report.folders import add_values, record, write_lines, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00"


class Tags(HTMLParser):
    """Elements of a page, with their attributes and texts."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def page_of(*folders, **options) -> str:
    path, _ = report(ReportOptions(runs=tuple(map(str, folders)), **options))
    return path.read_text("utf-8")


def test_a_run_on_one_page(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    call("report", [str(folder)])
    said = capsys.readouterr().out
    assert f"read       {folder}: 200 steps" in said and f"{folder}/report.html" in said
    text = " ".join(Tags((folder / "report.html").read_text("utf-8")).texts)
    for part in ("held-out loss", "goodput", "abc123", "4 x H200", "f(x):", "rewind to"):
        assert (part in text) == (part != "rewind to"), part
    assert "train.num_steps" in text and "train.seed" not in text.partition("Full config")[0]
    assert "+1.2%" in text  # predicted 42.0, measured 41.5 GiB
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]


def test_nothing_is_loaded(tmp_path):
    tags = Tags(page_of(write_run(tmp_path / "run"))).found
    loading = {"src", "href", "srcset", "action", "background", "poster", "style"}
    assert not [(tag, a) for tag, a in tags if loading & set(a) or tag in ("link", "iframe", "img")]
    policies = [a["content"] for t, a in tags if t == "meta" and "http-equiv" in a]
    (policy,) = policies
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert not re.search(r"https?:", policy)


def test_texts_of_a_run_stay_texts(tmp_path):
    folder = write_run(tmp_path / "<b>run", **{"data.mixture": (Source(EVIL, 1),)})
    manifest = json.loads((folder / "manifest.json").read_text()) | {"device": EVIL}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_sample(folder, 3, EVIL, EVIL)
    write_sample(folder, 3, "\ud800", EVIL)  # no text: the line is skipped
    clean = write_run(tmp_path / "clean")
    text = page_of(folder, output=str(tmp_path / "r.html"))
    tags = [tag for tag, _ in Tags(text).found]
    assert tags.count("script") == 2 and "img" not in tags and tags.count("b") == 2
    assert Tags(page_of(clean)).found.count(("script", {})) == 1
    assert "alert(1)" in text and "<script>alert" not in text and "\x00" not in text


def test_each_set_has_a_chart_and_the_test_split_a_figure(tmp_path):
    folder = write_run(tmp_path / "run", steps=60)
    evil = EVIL[:-1]
    losses = lambda step: {"step": step, "set_loss": {"web": 3.0, evil: 4.0}, "held_out_loss": 2.0}  # noqa: E731
    write_lines(folder / "metrics.jsonl", map(losses, (20, 40)))
    many = {f"set{i}": 1.0 for i in range(1000)}  # as in no run
    write_lines(folder / "metrics.jsonl", [{"step": 60, "test_loss": 2.5, "set_loss": many}])
    tags = Tags(text := page_of(folder))
    charts = [a["data-metric"] for _, a in tags.found if "data-metric" in a]
    sets = {name for name in charts if name.startswith("set_loss/")}
    assert {"set_loss/web", f"set_loss/{evil}"} <= sets and len(sets) <= MAX_SERIES
    assert "test loss" in tags.texts and "2.5000" in tags.texts and "<script>alert" not in text
    assert read_run(str(folder)).last_step == 60


def test_runs_side_by_side_differ_where_they_do(tmp_path):
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", seed=3, **{"optimizer.learning_rate": 1e-3})
    text = " ".join(Tags(page_of(one, two, output=str(tmp_path / "both.html"))).texts)
    table = text.partition("difference")[2].partition("Full config")[0].split()
    assert "optimizer.learning_rate" in table and "run.dir" in table and "train.seed" not in table


def test_runs_of_which_one_has_no_steps_and_a_run_that_just_began(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.json").write_text("{}")
    assert "No steps have been logged yet." in page_of(new)
    text = page_of(new, write_run(tmp_path / "old"), output=str(tmp_path / "r.html"))
    assert 'id="loss"' in text and "No step has been logged" not in text


def test_a_run_without_evaluation_speed_or_events(tmp_path):
    (tmp_path / "run").mkdir()
    write_lines(
        tmp_path / "run" / "metrics.jsonl", [{"step": 5, "loss": None}, {"step": 6, "loss": 3.0}]
    )
    tags = Tags(page_of(tmp_path / "run"))
    assert [a["id"] for tag, a in tags.found if tag == "figure"] == ["loss"]
    assert "held-out" not in tags.texts


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0, 0, 1e-9, 1e12])
def test_numbers_that_nobody_expects(tmp_path, value):
    lines = (write_run(tmp_path / "run", steps=60) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = ("step", "resumed_after_step")
    odd = [{k: v if k in kept else value for k, v in r.items()} for r in records]
    for name, now in (("all", odd), ("half", odd[:40] + records[40:])):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "metrics.jsonl", now)
        assert page_of(tmp_path / name).endswith("</html>\n")


def test_metrics_of_a_run_have_the_units_that_it_says(tmp_path):
    folder, old = write_run(tmp_path / "run"), write_run(tmp_path / "old")
    for run in (folder, old):
        values = {"fullest_expert": 1.5, "own": [1.0, 2.0], "empty": [None], "text": ["x"]}
        add_values(run, {190: values, 200: values | {"own": [1.0]}})
    described = {"fullest_expert": "tokens", "own": "meters", "loss": "bits"}
    known = {n: {"group": "a", "unit": unit, "meaning": EVIL} for n, unit in described.items()}
    (folder / TABLE_FILE).write_text(json.dumps({"version": 1, "metrics": known}))
    texts = Tags(page_of(folder)).texts
    assert {" tokens", " bits"} <= set(texts) and any(t.endswith(", meters") for t in texts)
    assert not {"text", "empty"} & set(texts)
    assert {" nats per token"} <= set(Tags(page_of(old)).texts)
    (folder / TABLE_FILE).write_text("{")
    assert " nats per token" in Tags(page_of(folder)).texts


SHOWN = "loss mfu grad_norm learning_rate step_seconds memory_gib tokens_seen skipped".split()


@pytest.mark.parametrize("value", [1e308, -1e308, 9e99, 5e-324, 2e-100, 10**399, -(10**399)])
@pytest.mark.parametrize("last", [120, 200])
def test_numbers_that_no_run_measures(tmp_path, value, last):
    """In some lines, of both signs in turn, and in all: sums of some are not finite."""
    folder, file = write_run(tmp_path / "run"), tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line.get("step", 999) <= last:
            sign = (-1) ** line["step"] if last < 200 else 1
            line |= {name: sign * value for name in SHOWN if name in line}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = " ".join(attributes.get("d", "") for _, attributes in Tags(page_of(folder)).found)
    assert paths and not re.search("nan|inf", paths)


def test_events_of_which_some_are_damaged(tmp_path):
    folder = write_run(tmp_path / "run")
    file = folder / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for number in (10**399, -(10**399), 1e308):
        damages = ({"age": number}, {"time": number}, {"step": number}, {"steps": [0, number]})
        write_lines(file, [line | d for line in lines for d in damages if d.keys() & line.keys()])
    assert "goodput" in page_of(folder)


def test_it_is_written_at_once_or_not_at_all(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    page_of(folder)
    before = (folder / "report.html").read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ConfigError, match="cannot be written: disk full"):
        page_of(folder)
    assert (folder / "report.html").read_bytes() == before
    assert not [p for p in folder.iterdir() if p.name.endswith(".tmp")]
    assert os.stat(folder / "report.html").st_mode & 0o444  # for others than the writer, too


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ("x.txt", "must end in .html"),
        ("none/x.html", "which does not exist"),
        ("d.html", "a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, monkeypatch, output, rule):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.html").mkdir()
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=rule):
        page_of(folder, output=output)
    with pytest.raises(ConfigError, match="does not exist"):
        page_of(folder, "nonesuch", output="x.html")
    assert not (tmp_path / "x.html").exists()


def data_of(text: str) -> dict:
    """What the script of a page reads."""
    return json.loads(re.search(r'"application/json" id="data">(.*?)</script>', text)[1])


def test_hours_of_steps_are_those_of_the_attempt_that_counts(tmp_path):
    """The second attempt repeats the steps from 150 on, an hour after the first."""
    (run,) = data_of(page_of(write_run(tmp_path / "run")))["runs"]
    steps, hours = run["hours"]
    assert steps == sorted(set(steps)) and hours == sorted(hours)
    assert steps == [0, 150, 200]
    assert hours[0] < 0.1 < 0.9 < hours[-1]
    assert run["tokens_per_step"] == 8192 and run["bits"] == 0


def test_bits_per_byte_are_drawn_and_convert_the_loss(tmp_path):
    folder = write_run(tmp_path / "run")
    write_lines(
        folder / "metrics.jsonl", [{"step": 200, "held_out_loss": 2.0, "bits_per_byte": 0.8}]
    )
    text = page_of(folder)
    (run,) = data_of(text)["runs"]
    assert run["bits"] == 0.4 and run["metrics"]["bits_per_byte"] == {"x": [200], "y": [0.8]}
    assert 'id="bits-per-byte"' in text and 'id="bits"' in text
    other = write_run(tmp_path / "other")
    assert 'id="bits"' not in page_of(folder, other, output=str(tmp_path / "both.html"))


def test_it_is_written_again_while_a_run_goes(tmp_path, monkeypatch, capsys):
    """Until the last step; the page then no longer reads its file again."""
    folder = write_run(tmp_path / "run", **{"train.num_steps": 202})
    seen = []

    def another_step(seconds):
        seen.append((seconds, (folder / "report.html").read_text("utf-8")))
        write_lines(folder / "metrics.jsonl", [record(200 + len(seen), random.Random(0))])

    monkeypatch.setattr(program, "pause", another_step)
    call("report", [str(folder), "--watch", "7"])
    assert [seconds for seconds, _ in seen] == [7, 7]
    assert all('<body data-live="7">' in text for _, text in seen)
    assert "data-live" not in (folder / "report.html").read_text("utf-8").partition("<script")[0]
    assert "watching   every 7 s" in capsys.readouterr().out
    call("report", [str(folder), "--watch", "7"])  # the run has ended
    assert len(seen) == 2 and "watching" not in capsys.readouterr().out


def test_ctrl_c_ends_it_with_a_page_that_stays(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", **{"train.num_steps": 300})

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "pause", interrupted)
    call("report", [str(folder), "--watch", "7"])
    assert '<body data-live="' not in (folder / "report.html").read_text("utf-8")


def test_every_part_of_the_time_has_a_color():
    css = (resources.files("jaxpar.tools.report") / "page.css").read_text("utf-8")
    for part in (*PARTS, "lost work", "down", "other"):
        assert f".p-{part.replace(' ', '-')} {{ fill: #" in css, part


def test_a_folder_that_is_no_run_is_left_out_of_several(tmp_path, capsys):
    run, other = write_run(tmp_path / "run", steps=10), tmp_path / "compiled"
    other.mkdir()
    output = str(tmp_path / "report.html")
    _, runs = report(ReportOptions(runs=(str(run), str(other)), output=output))
    assert len(runs) == 1
    assert f"{other} is not a run's folder, and is left out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not a run's folder"):
        report(ReportOptions(runs=(str(other),), output=output))
