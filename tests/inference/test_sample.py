"""The program that samples, in processes of its own: on other devices than the run had."""

import subprocess
import sys

import pytest

from jaxpar.config import ConfigError
from jaxpar.config.config_file import load_config
from jaxpar.inference import load, sample
from jaxpar.inference.generation import config_for_sampling
from jaxpar.inference.options import Sampling
from jaxpar.monitoring.samples import SAMPLES_FILE, read_samples
from tests import ranks


@pytest.fixture(scope="module")
def simulated_run(tmp_path_factory, write_config):
    """A run of a process with four simulated devices."""
    folder = tmp_path_factory.mktemp("simulated")
    short = ["--train.num-steps", "30", "--checkpoint.every", "30", "--evaluation.every", "0"]
    words = ["jaxpar.train", write_config(folder), *short, "--run.cpu-devices", "4"]
    program(*words)
    return folder / "run"


def program(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=ranks.environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_one_device_and_two_ranks_write_the_same(simulated_run):
    words = ["jaxpar.sample", str(simulated_run), "--temperature", "0", "--max-tokens", "20"]
    one = program(*words, "--prompt", "the cat ", "the dog ")
    two = program(*words, "--prompt", "the cat ", "the dog ", "--tensor", "2", "--save")
    assert one.stdout == two.stdout
    assert one.stdout.startswith("--- the cat ") and "--- the dog " in one.stdout
    kept = list(read_samples(simulated_run))
    assert [(s["step"], s["prompt"]) for s in kept] == [(30, "the cat "), (30, "the dog ")]
    assert one.stdout == "".join(f"--- {s['prompt']}{s['text']}\n" for s in kept)
    assert "[KV cache of 2 x 128 tokens: 0.1 MiB per device]" in one.stderr  # 64 KiB
    assert "[40 tokens in " in one.stderr and "tokens/s]" in one.stderr


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")


def test_one_text_is_shown_to_its_last_byte(capsys):
    """Also where it ends in half a character: nothing of the last tokens is held back."""
    ids = [*"né, ".encode(), *b"oui", 0xC3]
    made = iter([[ids[:2]], [ids[2:5]], [ids[5:]]])  # the first ends in half of an é, too
    options = sample.SampleOptions(run="", prompt=("> ",))
    assert sample._as_it_comes(made, options, Bytes()) == [ids]
    assert capsys.readouterr().out == "> né, oui\ufffd\n"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens = 0: must be at least 1"),
        ({"max_tokens": 10**12}, "--max-tokens = 1000000000000: .* use --max-tokens 200"),
        ({"max_tokens": 1 << 24}, "--max-tokens = 16777216: must be at most 1,048,576"),
        ({"tensor": 50_000}, "--tensor = 50000: must be at most 4,096"),
        ({"sampling": Sampling(seed=-1)}, "--seed = -1: .* use --seed 0"),
        ({"sampling": Sampling(seed=10**20)}, "--seed = 1.*0: must be at most 2,147,483,647"),
    ],
)
def test_numbers_beyond_the_devices_are_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        sample.check(sample.SampleOptions(run="", **asked))


def test_texts_are_kept_with_the_step_that_was_read(tmp_path):
    """That of imported weights is 0. A line that was cut off before takes none with it."""
    (tmp_path / SAMPLES_FILE).write_text('{"step": 40, "prom')
    for step in (0, 40):
        sample._save(sample.SampleOptions(run=str(tmp_path), prompt=("a",)), step, ["b"])
    assert [s["step"] for s in read_samples(tmp_path)] == [0, 40]


def test_texts_are_kept_with_runs_only(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint"):
        sample.check(sample.SampleOptions(run=str(tmp_path), save=True))


def test_a_cache_or_weights_larger_than_the_memory_are_refused(monkeypatch):
    cfg = config_for_sampling(load_config("quickstart"))
    monkeypatch.setattr(load, "host_memory", lambda: 1 << 20)
    rule = r"--max-tokens = 5000: needs .* GiB per device for the keys and values of 3 x 6,000"
    with pytest.raises(ConfigError, match=rule):
        load.check_cache(cfg, 3, 6000, 5000)
    load.check_cache(cfg, 1, 2, 1)
    with pytest.raises(ConfigError, match=r"RUN = 'runs/a': has .* GiB of weights in"):
        load.check_weights(cfg, "runs/a")
