"""The command `jaxpar`: it names every program, and each answers as by `python -m`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxpar import __main__ as command
from jaxpar import train
from jaxpar.commands import COMMANDS, completions, read
from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called
from jaxpar.runtime import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxpar"


def programs() -> set[str]:
    """The files in the package's root that have options, and the folders that can be run."""
    files = [file for file in PACKAGE.glob("*.py") if "\nOPTIONS = " in file.read_text("utf-8")]
    return {file.stem for file in files} | {f.parent.name for f in PACKAGE.glob("*/__main__.py")}


@pytest.fixture
def called_as(monkeypatch):
    """(sys.argv[0]) -> as if the process had been started so."""
    return lambda name: monkeypatch.setattr(sys, "argv", [name])


def test_every_program_is_a_command_and_is_listed(capsys):
    assert set(COMMANDS) == programs()
    for args in ([], ["--help"], ["-h"]):
        assert command.main(args) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        for name, line in COMMANDS.items():
            assert any(shown.split() == [name, *line.split()] for shown in lines)


def test_help_shows_a_page(capsys):
    for name in ("fine_tuning", "docs/fine_tuning.md"):
        assert command.main(["--help", name]) == 0
        assert capsys.readouterr().out.startswith("# Fine-tuning\n")
    with pytest.raises(ConfigError, match=r"Fix: use jaxpar --help checkpoints\.$|use python"):
        command.main(["--help", "chekpoints"])


@pytest.mark.parametrize(
    ("name", "row"), [("configuration", "|`run.dir`|"), ("combinations", "|`lora`|")]
)
def test_help_shows_a_page_that_is_generated(name, row, capsys):
    assert command.main(["--help", name]) == 0
    assert row in capsys.readouterr().out


def test_listing_the_commands_imports_no_jax():
    program = (
        "import sys; from jaxpar import __main__ as command; command.main([]); "
        "print([name for name in ('jax', 'numpy') if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_command_is_its_programs_main(monkeypatch, called_as):
    called_as("/somewhere/bin/jaxpar")
    monkeypatch.setattr(train, "main", lambda options: (options.config, list(sys.argv)))
    args = ["quickstart", "--train.seed", "3"]
    config, argv = command.main(["train", *args])
    assert (config.name, config.overrides) == ("quickstart", ("--train.seed", "3"))
    assert argv == ["jaxpar train", *args]


#: A wrong command line of each command, and the fix.
WRONG = {
    "train": ("quickstart --train.num-stps 3", "use --train.num-steps"),
    "launch": ("-n 2 -- quickstart --parallel.tenser 2", "use --parallel.tensor"),
    "sweep": ("quickstart --gird optimizer.learning_rate=1,2", "use --grid"),
    "data": ("prepar --input x", "use python -m jaxpar.data prepare"),
    "plan": ("llama3_8c --gpus 8", "use llama3_8b"),
    "convert": ("to-hff a b", "use python -m jaxpar.convert to-hf"),
    "sample": ("runs/x --promt a", "use --prompt"),
    "evaluate": ("runs/x --splt val", "use --split"),
    "report": ("runs/x --outptu a.html", "use --output"),
    "checkpoint": ("repaly runs/x", "use python -m jaxpar.checkpoint replay"),
    "profile": ("--bench quickstart --stps 3", "use --steps"),
    "doctor": ("--mehs data=2", "use --mesh"),
    "certify": ("quikstart", "use quickstart"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_line_is_answered_without_jax(name):
    words, fix = WRONG[name]
    program = (
        "import sys; from jaxpar.commands import read\n"
        "from jaxpar.config import ConfigError\n"
        f"try: read({name!r}, {words.split()!r})\n"
        "except ConfigError as error: print(error)\n"
        "print([name for name in ('jax', 'numpy') if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    error, imported = done.stdout.splitlines()
    assert f"Fix: {fix}" in error and imported == "[]", done.stderr


def test_what_a_shell_can_complete():
    assert completions("jaxpar pl") == ["plan"]
    assert completions("jaxpar data pre") == ["prepare", "prepare-chat", "prepare-pairs"]
    assert completions("jaxpar data prepare --hold") == ["--holdout"]
    assert completions("jaxpar sample --ch") == ["--chat"]
    assert completions("jaxpar sample --chat --sys") == ["--system"]
    assert completions("jaxpar train quickstart --optimizer.learning") == [
        "--optimizer.learning-rate"
    ]
    assert "llama3_8b" in completions("jaxpar plan llama3")
    assert completions("jaxpar nonesuch --") == []


def test_numbers_below_zero_are_values_and_arguments():
    assert read("train", ["quickstart", "--run.cpu-devices", "-1"]).config.overrides[1] == "-1"


def test_an_unknown_command_is_refused(called_as):
    called_as("/somewhere/bin/jaxpar")
    with pytest.raises(ConfigError, match=r"'trian': is not a command .* Fix: use jaxpar train\."):
        command.main(["trian"])
    for name, meant in {
        "chat": "sample --chat",
        "replay": "checkpoint replay",
        "quickstart": "train quickstart",
        "bench": "profile --bench",
    }.items():
        with pytest.raises(ConfigError, match=rf"Fix: use jaxpar {meant}\."):
            command.main([name])
    with pytest.raises(ConfigError, match="use one of train, launch, sweep, data"):
        command.main(["--gpus"])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_the_program_as_it_was_called(name, called_as, capsys):
    for argv0, words in (
        ("/x/bin/jaxpar", "jaxpar"),
        ("/x/jaxpar/__main__.py", "python -m jaxpar"),
    ):
        called_as(argv0)
        try:
            assert command.main([name, "--help"]) == 0
        except SystemExit as stop:
            assert stop.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{words} {name}" in shown
        assert f"python -m jaxpar.{name}" not in shown


def test_texts_name_modules_where_no_command_was_called(called_as):
    text = "`python -m jaxpar.profile --bench` and python -m jaxpar.data."
    assert as_called(text) == text
    called_as("jaxpar profile")
    assert as_called(text) == "`jaxpar profile --bench` and jaxpar data."
    called_as("/my folder/jaxpar train")
    assert as_called(text) == text


def test_exit_codes_are_the_programs():
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "plan", "nonesuch"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == exit_codes.EXIT_CONFIG
    assert done.stderr.startswith("config error: CONFIG = 'nonesuch': is not a config. ")


def test_an_installation_has_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, function = project["scripts"]["jaxpar"].partition(":")
    assert module == "jaxpar.__main__" and callable(getattr(command, function))
