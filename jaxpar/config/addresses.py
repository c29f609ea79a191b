"""Addresses of a composed model's fields on a command line: --model.block.mixer.num-heads 8.

An address begins with the name of a layer, or with a star for each; a star stands for any one name.
`--model.num-layers N` repeats or cuts the list, at whole periods after a beginning
(`components.model.repetition`).
"""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from jaxpar.components.model import in_words, repetition, with_length
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import flag, value_of
from jaxpar.config.layers import BESIDE, addressed, all_paths, type_at, with_value
from jaxpar.config.rules.type_check import describe, fits
from jaxpar.config.schema import Config

_LENGTH = "model.num_layers"

#: Most layers of a list that an option repeats.
MOST = 10_000


def addresses_layers(cfg: Config, path: str) -> bool:
    """Return whether a path is one of a composed model's layers."""
    section, *keys = path.split(".")
    if not cfg.model.layers or section != "model" or not keys:
        return False
    names = {"*", *(layer.name for layer in cfg.model.layers)}
    flags = {field.name for field in dataclasses.fields(cfg.model)}.difference(BESIDE)
    return path == _LENGTH or keys[0] in flags or (keys[0] in names and len(keys) > 1)


def with_addressed(cfg: Config, path: str, read: Callable[[Any], Any]) -> Config:
    """Return the config with another value of the fields that an address names.

    Args:     read: returns the value of a type, or a text that has none.
    Raises:   ConfigError for an address of no field, and for a value of another type.
    """
    layers = cfg.model.layers
    if path == _LENGTH:
        return _of_length(cfg, read(int))
    found = list(addressed(layers, path.split(".")[1:]))
    if len(path.split(".")) == 2:
        rule = "describes the layers of a model without model.layers, which are composed here"
        name = path.rpartition(".")[2]
        every = {one.rpartition(".")[2]: one for one in reversed(all_paths(layers))}
        alike = difflib.get_close_matches(name, every, n=1, cutoff=0.3) or [*every][-1:]
        near = [every[one] for one in alike]
        raise ConfigError(path, read(str), rule, f"use {flag(near[0], read(str))}")
    if not found:
        raise unknown_address(cfg, path, read(str))
    for at, old in found:
        hint = type_at(layers, at)
        value = read(hint)
        if not fits(value, hint):
            inner = [one for one in all_paths(layers) if one.startswith(f"{at}.")]
            fix = f"use {flag(at, old)}" if not inner else f"use {flag(inner[0])}"
            raise ConfigError(at, value, f"must be {describe(hint)}", fix)
        layers = with_value(layers, at, value)
    return dataclasses.replace(cfg, model=cfg.model.with_layers(layers))


def unknown_address(cfg: Config, path: str, text: str) -> ConfigError:
    """Return the error for an address of no field, with the most similar ones."""
    every = all_paths(cfg.model.layers)
    near = difflib.get_close_matches(path, every, n=2, cutoff=0.6) or [every[0]]
    ways = ", or ".join(flag(one, text) for one in near)
    return ConfigError(path, text, "is not a field of the model's layers", f"use {ways}")


def value_at(cfg: Config, path: str) -> Any:
    """Return the value of a field; of an address with a star, that of the first field."""
    if not addresses_layers(cfg, path) or path == _LENGTH:
        return value_of(cfg, path)
    return next(value for _, value in addressed(cfg.model.layers, path.split(".")[1:]))


def describes_layers(path: str) -> bool:
    """Return whether a path is of `model`, and not beside the layers of a composed model."""
    section, _, rest = path.partition(".")
    return section == "model" and rest.partition(".")[0] not in {*BESIDE} - {"layers", "num_layers"}


def changes_of_layers(base: Config, chosen: Config) -> dict[str, Any]:
    """Return the fields of a composed model's layers that differ from those of `base`, by address.

    Args:     base, chosen: their layers have the same names and components.
    """
    layers, found = base.model.layers, dict[str, Any]()
    if len(layers) != len(chosen.model.layers):
        found[_LENGTH] = len(chosen.model.layers)
        layers = with_length(layers, found[_LENGTH])
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
        fix = f"use {flag(_LENGTH, len(layers))}"
        raise ConfigError(_LENGTH, length, f"must be at most {MOST:,}", fix)
    times, rest = divmod(length - first, each) if isinstance(length, int) else (0, 1)
    if times < 1 or rest:
        near = [first + n * each for n in (times, times + 1) if n > 0] or [len(layers)]
        rule = f"must be {f'{first} plus ' if first else ''}a multiple of {each}, for the layers "
        if times < 1 and not rest:
            rule = f"must be at least {first + each}, for the layers "
        ways = ", or ".join(flag(_LENGTH, number) for number in near)
        raise ConfigError(_LENGTH, length, rule + in_words(layers), f"use {ways}")
    return dataclasses.replace(cfg, model=cfg.model.with_layers(with_length(layers, length)))
