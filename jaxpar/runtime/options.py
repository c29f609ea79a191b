"""Options and checks that several command lines share."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called
from jaxpar.config.numerals import whole_number
from jaxpar.config.rules.limits import Range
from jaxpar.config.rules.paths import absolute, check_path, refuse_address


class Parser(argparse.ArgumentParser):
    """A parser whose errors are config errors of one line.

    Help texts name programs as they were called: `python -m jaxpar.profile --bench` or `jaxpar bench`.
    """

    def __init__(self, prog: str, description: str | None, **more: Any):
        text = as_called(description or "")
        super().__init__(prog=as_called(prog), description=text, allow_abbrev=False, **more)
        self.ranges: dict[str, Range] = {}

    def whole(self, option: str, default: int | None, limits: Range, **more: Any) -> None:
        """Add an option whose value is a whole number in a range."""
        made = self.add_argument(option, type=_whole, default=default, **more)
        self.ranges[made.dest] = limits

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does, and check the options of `whole`.

        Raises:   ConfigError that names the option.
        """
        options, rest = super().parse_known_args(args, namespace)
        for name, limits in self.ranges.items():
            if (value := getattr(options, name)) is not None:
                check_range("--" + name.replace("_", "-"), value, limits)
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError("command line", self.prog, message, "see --help")


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_range(option: str, value: int, limits: Range) -> None:
    """Raises:   ConfigError for a value that is not in the range of an option."""
    if value not in limits:
        raise ConfigError(option, value, limits.rule(value), f"use {option} {limits.good}")


def check_file(option: str, path: str | None) -> None:
    """Check that an output file can be written, before the measurement.

    Args:     path: the value of the option; None if it is not set.
    Raises:   ConfigError that names the option.
    """
    refuse_address(option, path or "", f"use {option} runs/card.json")
    if path and Path(path).is_dir():
        fix = f"use {option} {Path(path) / 'card.json'}"
        raise ConfigError(option, path, "is a folder, not a file", fix)
    _check_place(option, path, "runs/card.json")


def check_folder(option: str, path: str | None) -> None:
    """Check that an output folder can be written, before the measurement.

    Raises:   ConfigError that names the option.
    """
    if path and Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(option, path, "is a file, not a folder", f"use {option} {path}-folder")
    _check_place(option, path, "runs/folder")


def _check_place(option: str, path: str | None, example: str) -> None:
    if path is None:
        return
    if not path:
        raise ConfigError(option, path, "is empty", f"use {option} {example}")
    check_path(option, path, f"use {option} {example}")
    place = absolute(path)
    if place.exists() and not place.is_dir() and not place.is_file():
        return  # a device or a pipe
    above = place if place.is_dir() else place.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        rule = f"is below {above}, which is a file"
        raise ConfigError(option, path, rule, f"use {option} {example}")
    if not os.access(above, os.W_OK | os.X_OK):
        rule = f"is in {above}, which is not writable"
        raise ConfigError(option, path, rule, f"use {option} {example}")
