"""A config as JSON: how it is saved with a run, and read again."""

import dataclasses
import json
import typing
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.config.fields import section_of, unknown_field


def to_json(cfg: Config) -> str:
    """The config as indented JSON, every field included."""
    return json.dumps(dataclasses.asdict(cfg), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The config that `to_json` wrote. Fields that are left out have their defaults.

    Raises:   ConfigError for a field that this version does not have, or a section without fields.
    """
    return _build(Config, json.loads(text), "")


def _build(cls: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        rule, name = "must be a section with fields, in braces", prefix.rstrip(".")
        raise ConfigError(name or "config", values, rule, "write {} for the defaults")
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in hints:
            error = unknown_field(prefix + name, value)
            raise ConfigError(error.field, value, error.rule, f"remove it, or {error.fix}")
    return cls(**{name: _built(hints[name], v, prefix + name) for name, v in values.items()})


def _built(hint: Any, value: Any, path: str) -> Any:
    section = section_of(hint)
    if section is None or (value is None and section is not hint):
        return value
    return _build(section, value, path + ".")
