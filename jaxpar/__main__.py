"""Pre-train language models: jaxpar COMMAND, or python -m jaxpar COMMAND"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jaxpar
from jaxpar.config import ConfigError
from jaxpar.runtime.commands import COMMANDS, GROUPS
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> int | None:
    """Run the command that the command line names, or list all commands."""
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
    """Return the list of commands, in groups."""
    text = f"usage: {called} COMMAND [options]\n\n"
    for title, commands in GROUPS.items():
        lines = [f"  {name:<12}{line}\n" for name, line in commands.items()]
        text += f"{title}:\n{''.join(lines)}\n"
    return f"{text}{called} COMMAND --help shows the options of a command."


def run() -> NoReturn:
    """Entry point of the console command."""
    run_program(main)


if __name__ == "__main__":
    run()
