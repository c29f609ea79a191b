"""Measure what this machine does: python -m jaxpar.bench COMMAND

    train CONFIG   tokens per second and MFU of the training program's own step
    attention      time, TFLOP/s and error of the attention backends; --tune writes their table
    matmuls CONFIG kernels of a step's matmuls that are best at the power limit; writes a table
    loss           peak memory of the loss, against whole logits
    compare        cards side by side, and what was different

Each prints its figures; with --card FILE, train, attention and loss write them down with the
conditions they hold under. `python -m jaxpar.bench train --help` lists the options of one.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxpar.bench import loss
from jaxpar.bench.attention import command as attention
from jaxpar.bench.cards import compare
from jaxpar.bench.matmuls import command as matmuls
from jaxpar.bench.training import command as training
from jaxpar.bench.training.command import WARM_UP, card, measure, summary
from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called, asks_help

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "kernels",
    "parallel",
    "model",
    "step",
    "profiling",
    "monitoring",
    "training",
)

__all__ = ["COMMANDS", "WARM_UP", "card", "main", "measure", "read_command", "summary"]

COMMANDS: dict[str, ModuleType] = {
    "train": training,
    "attention": attention,
    "matmuls": matmuls,
    "loss": loss,
    "compare": compare,
}


def main(argv: Sequence[str]) -> int:
    """The command line; the exit code."""
    if not argv or (argv[0] not in COMMANDS and asks_help(argv)):
        print(as_called(__doc__ or ""))
        return 0
    return _command(argv).main(argv[1:])


def read_command(argv: Sequence[str]) -> Any:
    """What a command line asks for, checked, without running it."""
    return _command(argv).read_command(argv[1:])


def _command(argv: Sequence[str]) -> ModuleType:
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        fix = f"start with {' or '.join(COMMANDS)}: python -m jaxpar.bench attention"
        raise ConfigError("command", name, f"is none of {', '.join(COMMANDS)}", fix)
    return COMMANDS[name]
