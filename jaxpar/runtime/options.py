"""What the command lines of the benchmarks share."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called


class Parser(argparse.ArgumentParser):
    """A parser whose errors are config errors, in one line.

    It names programs as they are called: `python -m jaxpar.bench`, or `jaxpar bench`.
    """

    def __init__(self, prog: str, description: str | None, **more: Any):
        text = as_called(description or "")
        super().__init__(prog=as_called(prog), description=text, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Raises:   ConfigError, always."""
        raise ConfigError("command line", self.prog, message, "see --help")


def parser(prog: str, doc: str | None, repeats: int | None, told: str = "%(default)s") -> Parser:
    """A parser with the options that every timed benchmark has.

    Args:     prog: as in `python -m jaxpar.bench loss`. doc: for --help. repeats: the default, and
              how it is told: None, where other options decide.
    """
    made = Parser(prog, doc)
    add = made.add_argument
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--repeats", type=int, default=repeats, help=f"batches timed of each program ({told})")
    add("--card", help="file to write the figures to, as JSON")
    add("--commit", help="commit to put on the card, where there is no checkout")
    return made


def check_repeats(options: argparse.Namespace) -> None:
    """Raises:   ConfigError unless --repeats is a number of times."""
    if options.repeats < 1:
        raise ConfigError("--repeats", options.repeats, "must be at least 1", "use --repeats 15")


def check_file(option: str, path: str | None) -> None:
    """Refuse a file that could not be written, before anything is measured for it.

    Args:     path: None: it was not asked for.
    Raises:   ConfigError, naming the option.
    """
    if path and Path(path).is_dir():
        fix = f"use {option} {Path(path) / 'card.json'}"
        raise ConfigError(option, path, "is a folder, not a file", fix)
    _check_place(option, path, "runs/card.json")


def check_folder(option: str, path: str | None) -> None:
    """The same of a folder to write in.

    Raises:   ConfigError, naming the option.
    """
    if path and Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(option, path, "is a file, not a folder", f"use {option} {path}-folder")
    _check_place(option, path, "runs/folder")


def _check_place(option: str, path: str | None, example: str) -> None:
    if path is None:
        return
    if not path:
        raise ConfigError(option, path, "is empty", f"use {option} {example}")
    place = Path(path).absolute()
    if place.exists() and not place.is_dir() and not place.is_file():
        return  # a device or a pipe
    above = place if place.is_dir() else place.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        rule = f"lies below {above}, which is a file"
        raise ConfigError(option, path, rule, f"use {option} {example}")
    if not os.access(above, os.W_OK | os.X_OK):
        rule = f"would be written in {above}, where you may not write"
        raise ConfigError(option, path, rule, f"use {option} {example}")
