"""The first run: text, training, a sample and two figures to compare; again, it goes on."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.commands import call
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.prepare.text import prepare
from jaxpar.monitoring.samples import read_samples
from jaxpar.training.first_run import learned

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

    said = r"^text .* source, to data/stdlib-bytes$.*^A sample:\ndef __init__\(self, .*"
    said += r"^Done in [\d.hms ]+$"
    assert re.search(said, text, re.MULTILINE | re.DOTALL)

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [r["held_out_loss"] for r in records if "held_out_loss" in r][-1]
    entropy = read_meta(data).unigram_entropy
    words = f"its loss on text that it has not seen is {loss:.2f}. Guessing has 5.55,\n"
    words += f"and knowing only how often each token occurs {entropy:.2f}: it needs more steps."
    assert words in text

    places = re.findall(rf"^((?:{data}|{run})/.*?)  +\S", text, re.MULTILINE)
    names = ["stdlib-bytes", "config.json", "metrics.jsonl", "checkpoints"]
    assert [Path(place).name for place in places] == names
    assert all(Path(place).exists() for place in places)
    assert f"-m jaxpar.sample '{run}' --prompt" in text  # as a shell reads it
    assert f"-m jaxpar.report '{run}'\n" in text
    (kept,) = read_samples(run)
    assert kept["prompt"] == "def __init__(self, " and kept["text"].rstrip() in text
    assert "-m jaxpar.train quickstart --train.num-steps 1000 --run.dir runs/longer" in text
    assert saved_steps(run) == [6]

    again, asked = run_quickstart()
    assert len(asked) == 1  # the text is there
    assert "already done" in again
    assert words in again
    assert saved_steps(run) == [6]


def test_what_was_learned_is_put_into_words():
    meta = SimpleNamespace(vocab_size=257, unigram_entropy=3.25)
    records = [{"loss": 5.0}, {"loss": 1.5, "held_out_loss": 1.94}]
    assert learned(records, meta) == (
        "What it learned: its loss on text that it has not seen is 1.94. Guessing has 5.55,\n"
        "and knowing only how often each token occurs 3.25: it has learned to use context."
    )
    assert "on the training text is 5.00." in learned(records[:1], meta)
    assert learned(records[:1], meta).endswith(" 3.25: it needs more steps.")


@pytest.mark.slow
def test_a_run_without_checkpoints_ends_without_a_sample(run_quickstart):
    assert "A sample:" not in run_quickstart("--checkpoint.every", "0")[0]
    assert "A sample:" in run_quickstart("--train.log-every", "100")[0]
