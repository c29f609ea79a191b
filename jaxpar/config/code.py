"""The option --code FILE: the code of a run's values, for a run that is read from its folder.

A run's config.json names the classes of its losses, probes, post-updates and callbacks. Reading it
imports nothing: `--code my_config.py` imports that file, and makes the values of its classes.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import layers
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
    """Return the config with the values whose classes are in some files or modules, or in jaxpar.

    Raises:   ConfigError for a file that has nothing of the config's, or fails.
    """
    code = _Code(files)
    loaded = layers.with_classes(cfg.model.layers, code.component)
    if loaded != cfg.model.layers:
        cfg = dataclasses.replace(cfg, model=cfg.model.with_layers(loaded))
    for path in FIELDS:
        held = value_of(cfg, path)
        if any(
            isinstance(one, SavedValue) for one in (held if isinstance(held, tuple) else (held,))
        ):
            cfg = replace(cfg, **{path: code.loaded(held, path)})
    for name, file in code.files.items():
        if name not in code.used:
            rule = "has no class or function that the config names"
            raise ConfigError("code", file, rule, "use the config file that the run began with")
    return cfg


class _Code:
    """Files and modules with the classes and functions of a config's values."""

    def __init__(self, files: Sequence[str]):
        self.files = {Path(file).name if file.endswith(".py") else file: file for file in files}
        self.used = set[str]()

    def loaded(self, held: Any, path: str) -> Any:
        """Return what a field holds, with the values whose code is here."""
        if isinstance(held, tuple):
            return tuple(self.loaded(value, path) for value in held)
        if not isinstance(held, SavedValue) or not self._has(held.name):
            return held
        cls: Any = self._find(held.name, path)
        cls = type(cls) if isinstance(cls, Value) else cls  # of `extend.token_loss`
        if not (isinstance(cls, type) and issubclass(cls, Value)):
            rule, fix = "is no class of values", "use the file that the run began with"
            raise ConfigError(path, held.name, rule, fix)
        known = {field.name: field for field in fields_of(cls)}
        values = {}
        for name, value in held.fields:
            if name not in known:
                rule, fix = f"is no field of {held.name}", "use the file that the run began with"
                raise ConfigError(path, name, rule, fix)
            is_function = "Callable" in str(known[name].type) and isinstance(value, str)
            if is_function and not self._has(value):
                return held
            values[name] = self._find(value, path) if is_function else value
        return cls(**values)

    def component(self, name: str) -> Any:
        """Return the class of a component, or None if its code is not here."""
        return self._find(name, layers.FIELD) if self._has(name) else None

    def _has(self, name: str) -> bool:
        where = name.rpartition(":")[0]
        return where in self.files or where.startswith("jaxpar.")

    def _find(self, name: str, path: str) -> Any:
        """Return the class or the function of a name, `file.py:name` or `module:name`."""
        where, _, parts = name.rpartition(":")
        file = self.files.get(where, where)
        self.used.add(where)
        place: Any = import_file(file) if file.endswith(".py") else importlib.import_module(file)
        for part in parts.split("."):
            place = getattr(place, part, None)
        if place is None:
            rule, fix = f"is not in {file}", "use the file that the run began with"
            raise ConfigError(path, name, rule, fix)
        return place
