"""Reads the config.json of a published model, and makes errors about its values."""

import math
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.json_reader import read_json_object

type Values = dict[str, Any]

CONFIG_FILE = "config.json"

#: What to do about a value that is wrong in a file that can be read.
CORRECT = f"correct it, or use the {CONFIG_FILE} that was published with the model"

#: Kinds of values, in words.
KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list of names",
}

#: The kind of each key's value, if it is present and not null; without the families' `fields`.
HOLDS: dict[str, type] = {
    "architectures": list,
    "layer_types": list,
    "max_position_embeddings": int,
    "max_window_layers": int,
    "no_rope_layer_interval": int,
    "original_max_position_embeddings": int,
    "partial_rotary_factor": float,
    "rope_local_base_freq": float,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "rope_theta": float,
    "sliding_window": int,
    "sliding_window_pattern": int,
}


#: Keys that may be infinite, and change nothing: the limits of Mamba's steps.
UNBOUNDED = {"time_step_limit"}


def refuse(key: str, value: Any, rule: str, fix: str) -> ConfigError:
    """Make the error for a key of config.json."""
    return ConfigError(f"{CONFIG_FILE} {key}", value, rule, fix)


def check_kind(key: str, value: Any, kind: type) -> None:
    """Raises:   ConfigError when a key has a value of another kind; null is always allowed."""
    good = isinstance(value, int | float if kind is float else kind)
    if kind is list and good:
        good = all(isinstance(name, str) for name in value)
    if value is not None and (not good or isinstance(value, bool) is not (kind is bool)):
        raise refuse(key, value, f"must be {KINDS[kind]}", CORRECT)


def read_config_json(folder: Path) -> Values:
    """Read the values of a folder's config.json.

    Raises:   ConfigError when it is missing or not JSON, or a value is of another kind.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        rule = f"has no {CONFIG_FILE}" if folder.is_dir() else "is not a folder"
        fix = "use a published folder with config.json and .safetensors files"
        raise ConfigError("DIR", str(folder), rule, fix)
    try:
        values = read_json_object(path, what="it", constants=True)
    except (ValueError, OSError) as error:
        rule, fix = f"cannot be read ({error})", "download the file again"
        raise ConfigError(CONFIG_FILE, str(path), rule, fix) from error
    for key, kind in HOLDS.items():
        check_kind(key, values.get(key), kind)
    for key, value in values.items():
        if key not in UNBOUNDED and not _finite(value):
            raise refuse(key, value, "must not have NaN or Infinity", CORRECT)
    return values


def _finite(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        return all(map(_finite, inner))
    return not isinstance(value, float) or math.isfinite(value)
