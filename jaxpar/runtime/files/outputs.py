"""Checks of the files and folders that a command will write, before it begins."""

import os
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import absolute, check_path, refuse_address


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
