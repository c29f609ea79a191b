"""A follower evaluates each checkpoint once, as it appears, and ends with the run."""

import shutil
import time
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.inference.follow import follow, record_of
from jaxpar.runtime.files import json_lines
from jaxpar.tools.report.charts import shown_of
from jaxpar.tools.report.runs import read_run
from tests.checkpoint.test_averaging import write_run
from tests.monitoring.test_sinks import scalars

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture
def run(config_file, tmp_path) -> Path:
    """A run that has ended, with checkpoints of steps 1 to 3."""
    last = {"train.num_steps": 3, "evaluation.num_batches": 1}
    return Path(write_run(tmp_path / "run", config_file, 1, 0, **last))


def records(run: Path) -> list[dict]:
    return list(json_lines.read(run / "evaluations" / "metrics.jsonl"))


def test_checkpoints_are_evaluated_as_they_appear(run, monkeypatch):
    last, away = checkpoint_folder(run) / "3", run.with_name("away")
    shutil.move(last, away)
    seen, said = [], []

    def evaluated(step: int) -> dict:
        seen.append(step)
        if step == 1:  # the run deletes it meanwhile
            shutil.rmtree(checkpoint_folder(run) / "1")
            raise ConfigError("--step", step, "is not a checkpoint", "use another")
        return {"text_loss": {"loss": 5.0 - step, "bits_per_byte": None}}

    monkeypatch.setattr(time, "sleep", lambda seconds: shutil.move(away, last))
    follow(str(run), evaluated, said.append)
    assert seen == [1, 2, 3] and "left out   step 1: the run has deleted it" in said
    assert records(run) == [{"step": step, "followed_loss": 5.0 - step} for step in (2, 3)]
    follow(str(run), evaluated, said.append)
    assert seen == [1, 2, 3] and "has ended" in said[-1]


def test_another_error_ends_the_follower(run):
    def fails(step: int) -> dict:
        raise ConfigError("--data", "x", "does not exist", "use another")

    with pytest.raises(ConfigError, match="--data"):
        follow(str(run), fails, print)
    assert not records(run)


def test_results_are_where_those_of_a_run_are(run):
    """In metrics.jsonl, TensorBoard and the report, and the loss is that of the command."""
    call("evaluate", [str(run), "--split", "val", "--follow", "--poll-seconds", "1"])
    found = {record["step"]: record for record in records(run)}
    assert list(found) == [1, 2, 3] and found[1]["followed_loss"] != found[2]["followed_loss"]
    shown = scalars(run / "evaluations", "evaluation/followed_loss")
    assert [step for step, _ in shown] == [1, 2, 3]
    output = run / "result.json"
    call("evaluate", [str(run), "--split", "val", "--step", "2", "--output", str(output)])
    assert f"{found[2]['followed_loss']}" in output.read_text()
    (run / "config.json").write_text("{}")
    read = read_run(str(run))
    points = read.series["followed_loss"].points()
    assert [(p.step, p.mean) for p in points] == [(s, r["followed_loss"]) for s, r in found.items()]
    assert "Loss, from a follower" in [shown.title for shown in shown_of([read])]


def test_a_record_of_tasks():
    of_task = {
        "alias": "python",
        "sample_len": 2,
        "acc,none": 0.5,
        "acc_stderr,none": "N/A",
        "exact_match,strict": 1,
        "exact_match_stderr,strict": 0.1,
    }
    found = record_of({"results": {"python": of_task}})
    assert found == {"task_scores": {"python": {"acc": 0.5, "exact_match_strict": 1.0}}}


def test_what_cannot_be_followed(run, tmp_path):
    for words, said in (
        ([str(run), "--follow"], "there is nothing to evaluate"),
        ([str(run), "--split", "val", "--follow", "--step", "3"], "--step = 3: has no meaning"),
        ([str(run), "--split", "val", "--follow", "--output", "x"], "--output = 'x': has no mean"),
        ([str(run), "--split", "val", "--follow", "--poll-seconds", "0"], "must be at least 1"),
        ([str(tmp_path / "none"), "--split", "val", "--follow"], "contains no checkpoint yet"),
    ):
        with pytest.raises(ConfigError, match=said):
            call("evaluate", words)
