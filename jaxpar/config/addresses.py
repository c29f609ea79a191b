"""Addresses of fields of layers on a command line: --model.block.mixer.num-heads 8.

An address begins with the name of a layer, or with a star for each; a star stands for any one name.
`--model.num-layers N` repeats or cuts the list, at whole periods after a beginning
(`components.model.repetition`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpar.components.model import in_words, repetition, with_length
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import LENGTH, flag, unknown_field, value_of
from jaxpar.config.layers import addressed, all_paths, type_at, with_value
from jaxpar.config.rules.type_check import describe, fits
from jaxpar.config.schema import Config

#: Most layers of a list that an option repeats.
MOST = 10_000


def addresses_layers(cfg: Config, path: str) -> bool:
    """Return whether a path addresses fields of layers, or their number."""
    section, *keys = path.split(".")
    names = {"*", *(layer.name for layer in cfg.model.distinct)}
    return path == LENGTH or (section == "model" and len(keys) > 1 and keys[0] in names)


def with_addressed(cfg: Config, path: str, read: Callable[[Any], Any]) -> Config:
    """Return the config with another value of the fields that an address names.

    Args:     read: returns the value of a type, or a text that has none.
    Raises:   ConfigError for an address of no field, and for a value of another type.
    """
    layers = cfg.model.layers
    if path == LENGTH:
        return _of_length(cfg, read(int))
    found = list(addressed(layers, path.split(".")[1:]))
    if not found:
        text = read(str)
        raise unknown_field(path, text, lambda near: flag(near, text), cfg)
    for at, old in found:
        hint = type_at(layers, at)
        value = read(hint)
        if not fits(value, hint):
            inner = [one for one in all_paths(layers) if one.startswith(f"{at}.")]
            fix = f"use {flag(at, old)}" if not inner else f"use {flag(inner[0])}"
            raise ConfigError(at, value, f"must be {describe(hint)}", fix)
        layers = with_value(layers, at, value)
    return dataclasses.replace(cfg, model=cfg.model.with_layers(layers))


def value_at(cfg: Config, path: str) -> Any:
    """Return the value of a field; of an address with a star, that of the first field."""
    if not addresses_layers(cfg, path) or path == LENGTH:
        return value_of(cfg, path)
    return next(value for _, value in addressed(cfg.model.layers, path.split(".")[1:]))


def changes_of_layers(base: Config, chosen: Config) -> dict[str, Any]:
    """Return the fields of layers that differ from those of `base`, by address.

    Args:     base, chosen: their layers have the same names and components.
    """
    layers, found = base.model.layers, dict[str, Any]()
    if len(layers) != len(chosen.model.layers):
        found[LENGTH] = len(chosen.model.layers)
        layers = with_length(layers, found[LENGTH])
    for path in all_paths(chosen.model.layers):
        keys = path.split(".")[1:]
        ((_, before),) = addressed(layers, keys)
        ((_, now),) = addressed(chosen.model.layers, keys)
        # Of a section that is None in `base`, fields with defaults too: any one of them sets it.
        is_new = len(keys) > 2 and next(addressed(layers, keys[:-1]))[1] is None
        if before != now or is_new:
            found[path] = now
    return found


def _of_length(cfg: Config, length: Any) -> Config:
    """Return the config with more or fewer layers: whole periods after those that do not repeat."""
    layers, (first, each) = cfg.model.layers, repetition(cfg.model.layers)
    if isinstance(length, int) and length > MOST:
        fix = f"use {flag(LENGTH, len(layers))}"
        raise ConfigError(LENGTH, length, f"must be at most {MOST:,}", fix)
    times, rest = divmod(length - first, each) if isinstance(length, int) else (0, 1)
    if times < 1 or rest:
        near = [first + n * each for n in (times, times + 1) if n > 0] or [len(layers)]
        rule = f"must be {f'{first} plus ' if first else ''}a multiple of {each}, for the layers "
        if times < 1 and not rest:
            rule = f"must be at least {first + each}, for the layers "
        ways = ", or ".join(flag(LENGTH, number) for number in near)
        raise ConfigError(LENGTH, length, rule + in_words(layers), f"use {ways}")
    return dataclasses.replace(cfg, model=cfg.model.with_layers(with_length(layers, length)))


def may_change(cfg: Config, path: str) -> bool:
    """Return whether `run.init_changes` names the field at an address, or a part that it is in."""
    within = f"{path.split('.', 2)[-1]}."
    return any(within.startswith(f"{field}.") for field in cfg.run.init_changes)
