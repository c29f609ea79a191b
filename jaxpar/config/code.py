"""The option --code FILE: the code of a run's values, for a run that is read from its folder.

A run's config.json names the classes of its losses, probes, post-updates and callbacks. Reading it
imports nothing: `--code my_config.py` imports that file, and makes the values of its classes.
"""

import importlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config.config_file import import_file
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import replace, value_of
from jaxpar.config.schema import Config
from jaxpar.config.values import FIELDS, SavedValue, Value, fields_of

CODE = "--code"


def take_code(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--code FILE` from the other arguments: (the others, the files).

    Raises:   ConfigError for an option without a file.
    """
    rest, files, words = list[str](), list[str](), iter(args)
    for arg in words:
        name, given, text = arg.partition("=")
        if name != CODE:
            rest.append(arg)
            continue
        text = text if given else next(words, "")
        if not text or text.startswith("--"):
            raise ConfigError("code", text, "needs a file or a module", "use --code my_config.py")
        files.append(text)
    return rest, files


def with_code(cfg: Config, files: Sequence[str]) -> Config:
    """Return the config with the values whose classes are in some files or modules.

    Raises:   ConfigError for a file that has no class of the config's, or fails.
    """
    for file in files:
        changed = {path: _resolved(value_of(cfg, path), path, file) for path in FIELDS}
        if all(changed[path] == value_of(cfg, path) for path in FIELDS):
            names = [v.name for path in FIELDS for v in _all(value_of(cfg, path)) if _is_saved(v)]
            rule = f"has none of the classes {', '.join(names) or '(all are loaded)'}"
            raise ConfigError("code", file, rule, "use the config file that the run began with")
        cfg = replace(cfg, **changed)
    return cfg


def _all(held: Any) -> tuple[Any, ...]:
    return held if isinstance(held, tuple) else (held,)


def _is_saved(value: Any) -> bool:
    return isinstance(value, SavedValue)


def _resolved(held: Any, path: str, file: str) -> Any:
    """Return what a field holds, with the values whose classes are in a file."""
    if isinstance(held, tuple):
        return tuple(_resolved(value, path, file) for value in held)
    if not isinstance(held, SavedValue):
        return held
    where, _, name = held.name.rpartition(":")
    if where not in (Path(file).name, file):
        return held
    cls: Any = _found(file, name, path)
    if not (isinstance(cls, type) and issubclass(cls, Value)):
        rule, fix = f"is no class of values in {file}", "use the file that the run began with"
        raise ConfigError(path, held.name, rule, fix)
    hints = typing.get_type_hints(cls)
    fields = {n: _value(v, hints.get(n), file, path) for n, v in held.fields}
    unknown = sorted(fields.keys() - {field.name for field in fields_of(cls)})
    if unknown:
        rule, fix = f"is no field of {name} in {file}", "use the file that the run began with"
        raise ConfigError(f"{path}: {name}", unknown[0], rule, fix)
    return cls(**fields)


def _value(value: Any, hint: Any, file: str, path: str) -> Any:
    """Return a field's value: a function by its name."""
    if isinstance(value, str) and "Callable" in str(hint):
        return _found(file, value.rpartition(":")[2], path)
    return value


def _found(file: str, name: str, path: str) -> Any:
    """Return what a file or a module has under a qualified name."""
    place: Any = import_file(file) if file.endswith(".py") else importlib.import_module(file)
    for part in name.split("."):
        place = getattr(place, part, None)
    if place is None:
        rule, fix = f"is not in {file}", "use the file that the run began with"
        raise ConfigError(path, name, rule, fix)
    return place
