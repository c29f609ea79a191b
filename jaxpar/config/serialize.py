"""Convert a config to JSON and back, as saved with a run."""

import dataclasses
import json
import typing
from typing import Any

from jaxpar.components.model import Layer
from jaxpar.config import Config, ConfigError, layers
from jaxpar.config.fields import field_types, hints_in, make_section, section_of, unknown_field
from jaxpar.config.json_reader import read_json
from jaxpar.config.listed import has_fields, hints_of, is_list, item_of, written
from jaxpar.config.values import OR_NAMES, Value, from_saved, to_values


def to_json(cfg: Config) -> str:
    """Return the config as indented JSON with every field."""
    return json.dumps(to_values(cfg), indent=2) + "\n"


def from_json(text: str, what: str = "the config") -> Config:
    """Read a config from `to_json`'s JSON. Missing fields have their defaults.

    Args:     what: the name of the text in errors.
    Raises:   ConfigError for an unknown field, or a section that is not an object; UnreadableJson
              as `read_json`.
    """
    return from_values(read_json(text.encode("utf-8", "surrogatepass"), what=what))


def from_values(values: Any) -> Config:
    """Make a config of parsed JSON. Raises:   ConfigError as `from_json`."""
    return _build(Config, values, "")


def field_from_values(path: str, value: Any) -> Any:
    """Return a field's value of parsed JSON. Raises:   ConfigError as `from_json`."""
    return _built(field_types().get(path, Any), value, path)


def value_text(path: str, value: Any) -> str:
    """Return a field's value of parsed JSON as on a command line, and any other value as it is."""
    try:
        read = field_from_values(path, value)
    except ConfigError:  # of another form, which a file may have
        return str(value)
    return written(read) if is_list(read) else str(value)


def _build(cls: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        rule, name = "must be a JSON object of fields", prefix.rstrip(".")
        fix = "use [] for no items" if has_fields(cls) else "use {} for the defaults"
        raise ConfigError(name or "config", values, rule, fix)
    hints = hints_of(cls) if has_fields(cls) else hints_in(cls)
    for name, value in values.items():
        if name not in hints:
            error = unknown_field(prefix + name, value)
            raise ConfigError(error.field, value, error.rule, f"remove it, or {error.fix}")
    built = {name: _built(hints[name], v, prefix + name) for name, v in values.items()}
    path = prefix.rstrip(".")
    if path in field_types():
        try:
            return make_section(cls, path, built)
        except ConfigError as error:
            fix = "add it, or leave out the section"
            raise ConfigError(error.field, "", error.rule, fix) from None
    for field in dataclasses.fields(cls):
        required = has_fields(cls) and field.default is dataclasses.MISSING
        if required and field.name not in values:
            raise ConfigError(f"{prefix}{field.name}", None, "is missing", "add it")
    return cls(**built)


def _built(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) or (hint,)
    if Value in options and typing.get_origin(hint) is tuple:
        return _saved(value, path)
    if Layer in options:
        return layers.from_values(value)
    if Value in options:
        named = value is None or (path in OR_NAMES and isinstance(value, str))
        return value if named else from_saved(value, path)
    if (item := item_of(hint)) is not None and isinstance(value, list):
        return tuple(_built(item, one, f"{path}[{i}]") for i, one in enumerate(value))
    section = section_of(hint)
    if section is None or (value is None and section is not hint):
        return value
    return _build(section, value, path + ".")


def _saved(values: Any, path: str) -> tuple[Value, ...]:
    if not isinstance(values, list):
        raise ConfigError(path, values, "must be a list", "use [] for none")
    return tuple(from_saved(one, f"{path}[{i}]") for i, one in enumerate(values))
