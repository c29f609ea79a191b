"""The first run: text, training, a sample and two figures to compare; again, it goes on."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.commands import call
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.prepare.text import prepare
from jaxpar.monitoring.samples import read_samples

#: A small model for a few steps.
SMALL = """--train.num-steps 6 --optimizer.warmup-steps 1 --train.log-every 2 --data.seq-len 64
--train.global-batch-size 4 --model.num-layers 1 --model.d-model 32
--model.layers.feed-forward.d-ff 64 --checkpoint.every 6 --evaluation.every 6
--evaluation.num-batches 1""".split()


@pytest.fixture
def run_quickstart(only_devices, monkeypatch, text_file: Path, tmp_path: Path, capsys):
    """(arguments) -> what quickstart prints, and the options that it prepares text with.

    Whatever it asks to be prepared, a little text is.
    """
    monkeypatch.chdir(tmp_path)
    asked = []

    def prepare_little(options, progress):
        asked.append(options)
        little = dataclasses.replace(options, input=(str(text_file),), holdout=0.2)
        return prepare(little, progress)

    monkeypatch.setattr("jaxpar.data.prepare.text.prepare", prepare_little)

    def run(*args: str):
        capsys.readouterr()
        with only_devices(1):
            assert call("train", ["quickstart", "--run.dir", "my run", *SMALL, *args]) == 0
        return capsys.readouterr().out, asked

    return run


def test_quickstart_prepares_trains_writes_and_says_what_came_out(run_quickstart):
    text, asked = run_quickstart()
    data, run = Path("data/stdlib-bytes"), Path("my run")
    assert [(o.input, o.tokenizer, o.output) for o in asked] == [(("stdlib",), "bytes", str(data))]

    said = r"^text .* source, to data/stdlib-bytes$.*^A sample:\nimport .*^Done in [\d.hms ]+$"
    assert re.search(said, text, re.MULTILINE | re.DOTALL)

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [r["loss"] for r in records if "loss" in r][-1]
    entropy = read_meta(data).unigram_entropy
    assert f"training loss at the end    {loss:.3f} nats per token" in text
    assert f"unigram entropy of the text {entropy:.3f}: " in text

    places = re.findall(rf"^((?:{data}|{run})/.*?)  +\S", text, re.MULTILINE)
    names = ["stdlib-bytes", "config.json", "metrics.jsonl", "checkpoints"]
    assert [Path(place).name for place in places] == names
    assert all(Path(place).exists() for place in places)
    assert f"-m jaxpar.sample '{run}' --prompt" in text  # as a shell reads it
    assert f"-m jaxpar.report '{run}'\n" in text
    (kept,) = read_samples(run)
    assert kept["prompt"] == "import " and kept["text"].rstrip() in text
    assert "-m jaxpar.train quickstart --train.num-steps 1000 --run.dir runs/longer" in text
    assert saved_steps(run) == [6]

    again, asked = run_quickstart()
    assert len(asked) == 1  # the text is there
    assert "already done" in again
    assert f"training loss at the end    {loss:.3f} nats per token" in again
    assert saved_steps(run) == [6]


@pytest.mark.slow
def test_a_run_without_checkpoints_ends_without_a_sample(run_quickstart):
    assert "A sample:" not in run_quickstart("--checkpoint.every", "0")[0]
    assert "A sample:" in run_quickstart("--train.log-every", "100")[0]
