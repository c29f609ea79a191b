"""config.json of a published model as values, and the error for one of them."""

import json
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError

type Values = dict[str, Any]

CONFIG_FILE = "config.json"


def refuse(key: str, value: Any, rule: str, fix: str) -> ConfigError:
    """The error for a key of config.json."""
    return ConfigError(f"{CONFIG_FILE} {key}", value, rule, fix)


def read_config_json(folder: Path) -> Values:
    """The values of a folder's config.json.

    Raises:   ConfigError when there is none, or it is not JSON.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        rule = f"has no {CONFIG_FILE}" if folder.is_dir() else "is no folder"
        fix = "give a folder with config.json and .safetensors files, as published"
        raise ConfigError("DIR", str(folder), rule, fix)
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        fix = "fetch the file again"
        raise ConfigError(CONFIG_FILE, str(path), f"is not JSON ({error})", fix) from error
    if not isinstance(values, dict):
        raise ConfigError(CONFIG_FILE, str(path), "is not a JSON object", "fetch the file again")
    return values
