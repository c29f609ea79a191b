"""Measure training on this machine: python -m jaxpar.bench COMMAND

    train CONFIG    tokens per second and MFU of a config's train step
    compare         cards side by side, with the conditions that differ

Each command prints its figures. With --card FILE, train also writes them to a JSON file, along with
the conditions of the measurement. `python -m jaxpar.bench train --help` lists the options of a
command.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxpar.bench.cards import compare
from jaxpar.bench.training import command as training
from jaxpar.bench.training.command import WARM_UP, card, measure, summary
from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called, asks_help

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "parallel",
    "model",
    "step",
    "planning",
    "profiling",
    "monitoring",
    "training",
)

__all__ = ["COMMANDS", "WARM_UP", "card", "main", "measure", "read_command", "summary"]

COMMANDS: dict[str, ModuleType] = {"train": training, "compare": compare}


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if not argv or (argv[0] not in COMMANDS and asks_help(argv)):
        print(as_called(__doc__ or ""))
        return 0
    return _command(argv).main(argv[1:])


def read_command(argv: Sequence[str]) -> Any:
    """Parse and check a command line without running it."""
    return _command(argv).read_command(argv[1:])


def _command(argv: Sequence[str]) -> ModuleType:
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        fix = "use, for example, python -m jaxpar.bench train quickstart"
        raise ConfigError("command", name, f"must be one of {', '.join(COMMANDS)}", fix)
    return COMMANDS[name]
