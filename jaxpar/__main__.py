"""Pre-train language models: jaxpar COMMAND, or python -m jaxpar COMMAND"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jaxpar
from jaxpar.config import ConfigError
from jaxpar.runtime.program import run_program

#: Every command with what it does. `jaxpar NAME` is `python -m jaxpar.NAME`.
GROUPS = {
    "start": {
        "quickstart": "prepare text, train a small model on it and sample from it",
        "doctor": "check that this machine is fit for training",
    },
    "prepare": {
        "data": "make datasets of tokens from text and chats; inspect and convert them",
        "plan": "predict memory and speed of every layout of a config, without a GPU",
        "convert": "import and export published models and adapters",
    },
    "train": {
        "train": "train a model, or resume a run",
        "launch": "train with several processes on this host, and restart them when one fails",
    },
    "use a model": {
        "sample": "write text with the model of a run",
        "evaluate": "score the model of a run on tasks of the Evaluation Harness",
    },
    "look at a run": {
        "report": "make an HTML page of one or more runs",
        "checkpoint": "list, verify and compare checkpoints",
        "profile": "show where the time and memory of a step go",
        "replay": "repeat a step of a run and compare the bits",
    },
    "check jaxpar": {
        "verify": "compare meshes with the plain model on one device",
        "bench": "measure training, attention, matmuls and the loss on this machine",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def main(argv: Sequence[str]) -> int | None:
    """Run the command that the command line names; without one, list them."""
    name, *rest = argv or ["--help"]
    called = "python -m jaxpar" if Path(sys.argv[0]).name == "__main__.py" else "jaxpar"
    if name in ("--help", "-h", "--version"):
        print(f"jaxpar {jaxpar.__version__}" if name == "--version" else help_text(called))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"use {called} {near[0]}" if near else f"use one of {', '.join(COMMANDS)}"
        raise ConfigError("COMMAND", name, "is not a command of jaxpar", fix)
    sys.argv = [f"{called} {name}", *rest]  # `command_line.as_called` reads it
    module = importlib.import_module(f"jaxpar.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"jaxpar.{name}.__main__")
    return module.main(rest)


def help_text(called: str) -> str:
    """The commands, in groups."""
    text = f"usage: {called} COMMAND [options]\n\n"
    for title, commands in GROUPS.items():
        lines = [f"  {name:<12}{line}\n" for name, line in commands.items()]
        text += f"{title}:\n{''.join(lines)}\n"
    return f"{text}{called} COMMAND --help shows the options of a command."


def run() -> NoReturn:
    """The console command."""
    run_program(main)


if __name__ == "__main__":
    run()
