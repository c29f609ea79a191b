"""The table of runs, in the terminal and in the report."""

import json
import shutil
from datetime import datetime

import pytest

from jaxpar.commands import call
from jaxpar.config import Attention, ConfigError, Glu, Layer, Model
from jaxpar.config.layers import by_address
from jaxpar.tools.report import facts, listing
from jaxpar.tools.report.page import page
from jaxpar.tools.report.runs import read_run
from tests.another_user import as_another_user, open_folder
from tests.tools.report.folders import write_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three runs in subfolders. The one with more steps has the lower loss."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", steps=100, **{"optimizer.learning_rate": 1e-3})
    write_run(tmp_path / "runs/sweep/b", steps=400, **{"optimizer.learning_rate": 2e-3})
    write_run(tmp_path / "runs/sweep/c", steps=200, **{"model.tie_embeddings": True})
    return tmp_path


def test_layers_differ_by_fields(tmp_path):
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=32)
    for width in (64, 96):
        layers = [Layer("first", attention, Glu(32)), Layer("block", attention, Glu(width))]
        model = Model(d_model=32, vocab_size=64, layers=layers)
        write_run(tmp_path / str(width), model=model)
    runs = [read_run(str(tmp_path / name)) for name in ("64", "96")]
    one, other = listing.summaries(runs)
    widths = {run.name: run.differs["model.block.feed_forward.d_ff"] for run in (one, other)}
    assert sorted(widths.values()) == [64, 96]
    text = "".join(facts.config(runs).itertext())
    assert "model.block.feed_forward.d_ff6496" in text.partition("Full config")[0]
    text = "".join(facts.config(runs[:1]).itertext())
    assert "model.first.feed_forward.d_ff32" in text.partition("Full config")[0]
    assert not [path for path in one.differs if path.startswith(("model.layers", "model.first"))]


@pytest.mark.parametrize(
    "values",
    [
        [],
        {"distinct": ["first"], "order": [0]},
        {"distinct": [{"name": "first"}], "order": [1]},
        {"distinct": [{"name": "first"}], "order": "0"},
    ],
)
def test_layers_of_another_form_are_a_value(values):
    assert by_address(values) == {"model.layers": values}


def test_the_best_run_comes_first(folder, capsys):
    call("report", ["--list"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1::2]] == [
        "runs/sweep/b",
        "runs/sweep/c",
        "runs/a",
    ]
    assert "optimizer.learning_rate 0.002" in printed[2] and "run.dir" not in printed[2]
    assert "train.seed" not in printed[2]  # the same in all
    assert max(map(len, printed[::2])) < 200 and "400/400" in printed[1]


def test_json_has_the_same_runs_in_full_precision(folder, capsys):
    call("report", ["--list", "runs/sweep", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found] == ["runs/sweep/b", "runs/sweep/c"]
    assert found[0]["held_out_loss"] < found[1]["held_out_loss"]
    assert found[1]["differs"]["model.tie_embeddings"] is True


@pytest.mark.parametrize(
    "name", ["config.json", "manifest.json", "metrics.jsonl", "events.jsonl", "samples.jsonl"]
)
def test_a_run_that_cannot_be_read_is_named_and_left_out(folder, capsys, name):
    (folder / "runs/a" / name).unlink(missing_ok=True)
    (folder / "runs/a" / name).symlink_to("/proc/self/mem")  # reading it is an error for everybody
    call("report", ["--list", "--json"])
    said = capsys.readouterr()
    assert {run["name"] for run in json.loads(said.out)} == {"runs/sweep/b", "runs/sweep/c"}
    assert len(said.err.splitlines()) == 1 and "left out   " in said.err and "runs/a" in said.err
    with pytest.raises(ConfigError, match=r"runs/a.*cannot be read: ") as error:
        read_run("runs/a")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"train": 5}', '{"train": null}'])
def test_a_damaged_run_is_named_and_left_out(folder, capsys, content):
    (folder / "runs/a/config.json").write_text(content)
    call("report", ["--list"])
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert "left out   " in said.err and "runs/a/config.json" in said.err
    assert "runs/sweep/b" in said.out


def test_a_folder_that_cannot_be_read_is_named_and_left_out(folder, capsys, monkeypatch):
    real = type(folder).iterdir

    def refused(path):
        if path.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    (folder / "runs/private").mkdir()
    monkeypatch.setattr(type(folder), "iterdir", refused)
    call("report", ["--list"])
    said = capsys.readouterr()
    assert "runs/sweep/b" in said.out
    assert said.err == "left out   runs/private cannot be read: Permission denied\n"


@pytest.mark.parametrize(("name", "said"), [("none", "is not a folder"), ("runs/empty", "no run")])
def test_a_folder_without_runs_is_one_error(folder, name, said):
    (folder / "runs/empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        call("report", ["--list", name])


def test_fields_that_differ_are_those_of_any_two():
    configs = [{"a": 1, "b": 2, "run.dir": "x"}, {"a": 1, "b": 3, "run.dir": "y"}, {"a": 1, "c": 0}]
    assert listing.differing_fields(configs) == [{"b": 2}, {"b": 3}, {"c": 0}]


def test_a_report_of_several_runs_begins_with_the_table(folder):
    both = [read_run(name) for name in ("runs/a", "runs/sweep/b")]
    html = page(both, datetime.now().astimezone()).decode()
    assert html.index("<h2>Runs</h2>") < html.index('class="cards"')
    assert "<h2>Runs</h2>" not in page(both[:1], datetime.now().astimezone()).decode()


def test_folders_of_another_user_are_named_and_left_out(folder, capfd):
    """As another user, of a shared folder with runs that were made under umask 077."""
    with open_folder() as place:
        shutil.copytree(folder / "runs", place / "runs")
        closed = (place / "runs/a", place / "runs/sweep/b/config.json")
        for one in closed:
            one.chmod(0o000)
        told = as_another_user(lambda: call("report", ["--list", str(place / "runs")]))
        assert told == "None"
        out, said = capfd.readouterr()
        assert f"{place}/runs/sweep/c" in out and "Traceback" not in said
        left_out = [line for line in said.splitlines() if line.startswith("left out   ")]
        assert len(left_out) == 2 and all(any(str(x) in y for y in left_out) for x in closed)
        for run in ("runs/a", "runs/sweep/b"):
            told = as_another_user(lambda run=run: read_run(str(place / run)))
            assert told.startswith("ConfigError: RUN = ") and "Permission denied" in told
