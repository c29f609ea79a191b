"""The command `jaxpar`: it names every program, and each answers as by `python -m`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxpar import __main__ as command
from jaxpar import train
from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called
from jaxpar.runtime import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxpar"


def programs() -> set[str]:
    """The doors in the package's root, and the rooms that can be run."""
    doors = {file.stem for file in PACKAGE.glob("*.py") if not file.stem.startswith("__")}
    return doors | {file.parent.name for file in PACKAGE.glob("*/__main__.py")}


@pytest.fixture
def called_as(monkeypatch):
    """(sys.argv[0]) -> as if the process had been started so."""
    return lambda name: monkeypatch.setattr(sys, "argv", [name])


def test_every_program_is_a_command_and_is_listed(capsys):
    assert set(command.COMMANDS) == programs()
    for args in ([], ["--help"], ["-h"]):
        assert command.main(args) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        for name, line in command.COMMANDS.items():
            assert any(shown.split() == [name, *line.split()] for shown in lines)


def test_listing_the_commands_imports_no_jax():
    program = (
        "import sys; from jaxpar import __main__ as command; command.main([]); "
        "print([name for name in ('jax', 'numpy', 'tyro') if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_command_is_its_programs_main(monkeypatch, called_as):
    called_as("/somewhere/bin/jaxpar")
    monkeypatch.setattr(train, "main", lambda args: (list(args), list(sys.argv)))
    args = ["quickstart", "--train.seed", "3"]
    assert command.main(["train", *args]) == (args, ["jaxpar train", *args])


def test_an_unknown_command_is_refused(called_as):
    called_as("/somewhere/bin/jaxpar")
    with pytest.raises(ConfigError, match=r"'trian': is not a command .* Fix: use jaxpar train\."):
        command.main(["trian"])
    with pytest.raises(ConfigError, match="use one of quickstart, doctor, data, plan"):
        command.main(["--gpus"])


@pytest.mark.parametrize("name", sorted(command.COMMANDS))
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
    called_as("jaxpar bench")
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
