"""Each recipe's page shows its script, whose commands can be read, and which runs in small."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jaxpar.commands import call
from jaxpar.commands import read as read_options
from jaxpar.config.validate import resolve
from jaxpar.runtime.processes.launch_options import LaunchRun
from jaxpar.train import TrainOptions
from scripts.recipes import draw_curve, python_text
from tests.meta.test_docs import check_command, commands

ROOT = Path(__file__).resolve().parents[2]
PAGES, SCRIPTS = ROOT / "docs" / "recipes", ROOT / "scripts" / "recipes"

#: The devices of each recipe's training commands.
DEVICES = {
    "small_text": [1, 2],
    "gpt2_124m": [1, 1],
    "llama_1b": [8],
    "llama_8b": [8],
    "experts": [8, 8],
    "long_context": [8, 8, 8, 8],
    "sft": [1, 2],
    "dpo": [1, 2],
}


def page(name: str) -> str:
    """A recipe's page."""
    return (PAGES / f"{name}.md").read_text("utf-8")


def shown(name: str, variables: dict[str, str] | None = None, options: str = "") -> str:
    """A recipe's commands with variables and options; without them, as its page shows them."""
    text = (SCRIPTS / f"{name}.sh").read_text("utf-8").partition("set -eux\n")[2]
    found = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: (variables or {}).get(m[1], m[2]), text)
    return found.replace(' "$@"', options and f" {options}")


def resolved(text: str, devices: list[int]) -> None:
    """Read shell lines, and resolve each training command for its number of devices."""
    training = iter(devices)
    for words in commands(f"```sh\n{text}```\n"):
        options = read_options(words[0].removeprefix("jaxpar."), words[1:])
        if isinstance(options, TrainOptions | LaunchRun):
            resolve(options.config.asked(lambda _, __, like: like), next(training))
    assert not [*training], "more devices than training commands"


def test_every_recipe_has_a_page_a_script_and_a_row():
    assert {path.stem for path in PAGES.glob("*.md")} == {*DEVICES, "README"}
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == {*DEVICES}
    rows = re.findall(r"^\| \[.*?\]\((\w+)\.md\)", page("README"), re.M)
    assert rows == list(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_page_shows_the_script(name):
    assert f"```sh\n{shown(name)}```\n" in page(name), f"of {name}.sh:\n{shown(name)}"
    assert len(page(name).split()) <= 450


@pytest.mark.parametrize("name", DEVICES)
def test_commands_can_be_read_and_fit_their_devices(name):
    resolved(shown(name), DEVICES[name])
    for words in commands(page(name)):
        check_command(words)


@pytest.mark.parametrize("name", ["experts", "long_context"])
def test_a_run_in_small_can_be_read(name):
    (block,) = re.findall(
        rf"^(.*)sh scripts/recipes/{name}\.sh(.*)", page(name).replace("\\\n", " "), re.M
    )
    variables = dict(word.split("=") for word in shlex.split(block[0]))
    options = " ".join(shlex.split(block[1]))
    devices = int(re.search(r"--run\.cpu-devices (\d+)", options)[1])
    resolved(shown(name, variables, options), [devices] * len(DEVICES[name]))


@pytest.mark.parametrize("name", [name for name in DEVICES if "$ python -m" in page(name)])
def test_plans_that_are_shown_are_printed(name):
    plans = re.findall(r"^\$ python -m jaxpar\.plan (.*)\n((?:.*\n)*?)```", page(name), re.M)
    assert plans
    for command, lines in plans:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            call("plan", shlex.split(command))
        printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        for part in re.split(r"^\.\.\.$", lines, flags=re.MULTILINE):
            assert part.strip("\n") in printed, command


# ------------------------------------------------------------------------------ run in small

#: Fields of a small model, and of its layers.
SMALL = "--model.num-layers 2 --model.d-model 32 --train.global-batch-size 8"
ATTENTION = "--model.layers.mixer.num-heads 4 --model.layers.mixer.num-kv-heads 4"
ATTENTION += " --model.layers.mixer.head-dim 8"
DENSE = f"{SMALL} {ATTENTION} --model.layers.feed-forward.d-ff 64"
EXPERTS = f"{SMALL} {ATTENTION} --model.layers.feed-forward.expert.d-ff 32"
EXPERTS += " --model.layers.feed-forward.num-experts 8"
EXPERTS += " --model.layers.feed-forward.experts-per-token 2"
TEXT = {"INPUT": "input.txt", "TOKENIZER": "bpe:400"}
SHORT = "--data.seq-len 32 --evaluation.num-batches 1 --evaluation.every 4"
EIGHT = f"{SHORT} --run.cpu-devices 8"


def run(name: str, folder: Path, options: str = "", **variables: str) -> str:
    """Run a recipe's script in a folder. Returns:   what it prints."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(ROOT / "scripts")
        (folder / "input.txt").write_text(python_text.text()[:100_000], "utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT)} | variables
    ended = subprocess.run(
        ["sh", str(SCRIPTS / f"{name}.sh"), *options.split()],
        cwd=folder,
        env=env | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def steps(folder: Path) -> list[int]:
    """Steps of a run that were evaluated."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [one["step"] for one in records if "held_out_loss" in one]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_text_sft_and_dpo_run_in_small(tmp_path):
    options, halves = f"{DENSE} --evaluation.num-batches 1", {"HALF": "2", "STEPS": "4"}
    out = run("small_text", tmp_path, options, **halves)
    assert "its end is cut off: 2% as its held-out split" in out
    assert "cluster    launch: process 0 of 2" in out and "2 x cpu, mesh data=2" in out
    assert "restored step 2" in out and steps(tmp_path / "runs" / "small_text") == [2, 4]
    assert "mesh tensor=2" in run("sft", tmp_path, options, **halves)
    assert steps(tmp_path / "runs" / "sft") == [2, 4]
    assert "mesh pipeline=2" in run("dpo", tmp_path, options, **halves)
    assert steps(tmp_path / "runs" / "dpo") == [2, 4]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "options", "variables", "said"),
    [
        ("gpt2_124m", f"{DENSE} {SHORT} --model.vocab-size 512", {"VOCAB": "512"}, "restored"),
        ("llama_1b", f"{DENSE} {EIGHT}", TEXT, "mesh data=8"),
        (
            "llama_8b",
            f"{DENSE} {EIGHT} --model.vocab-size 512 --train.global-batch-size 64",
            TEXT,
            "mesh data=8",
        ),
        (
            "experts",
            f"{EXPERTS} {EIGHT} --model.vocab-size 512",
            TEXT | {"EXPERT": "4"},
            "mesh data=2 expert=4",
        ),
        (
            "long_context",
            f"{DENSE} --run.cpu-devices 8 --evaluation.num-batches 1 --model.vocab-size 512",
            TEXT | {"SHORT": "32", "LONG": "64", "LONGEST": "128", "FIRST": "2", "LAST": "2"},
            "mesh data=2 sequence=4",
        ),
    ],
)
def test_recipes_run_in_small(name, options, variables, said, tmp_path):
    assert said in run(name, tmp_path, options, HALF="2", STEPS="4", **variables)


# ------------------------------------------------------------------------- text and pictures


def test_chats_are_first_sentences_of_docstrings():
    source = '''
class Log:
    """A log of lines.

    More of it."""
    def add(self, line, when=0):
        """Append a line. Flush
        it."""
    def _hidden(self):
        """Not public."""
'''
    found = {
        name: python_text.first_sentence(text) for name, text in python_text.documented(source)
    }
    assert found == {"Log": "A log of lines.", "Log.add(line, when)": "Append a line."}


def test_a_rejected_answer_has_the_words_of_the_chosen_one(monkeypatch):
    answers = {"What does a do?": "Return the log.", "What does b do?": "Add."}
    monkeypatch.setattr(python_text, "answers", lambda: answers)
    (row,) = map(json.loads, python_text.pairs().splitlines())
    assert row["chosen"] == "Return the log." and row["rejected"] == "Return log. the"


def test_a_curve_has_a_line_for_each_metric(tmp_path):
    records = [{"step": n, "loss": 4 - n} for n in (1, 2, 3)] + [{"step": 3, "held_out_loss": 2}]
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (tmp_path / "metrics.jsonl").write_text(lines, "utf-8")
    drawn = draw_curve.picture(tmp_path, ["loss", "held_out_loss"], "Loss", "of a run")
    texts = {one.text for one in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}
    assert {"Loss", "of a run", "loss", "held out loss", "step"} <= texts
