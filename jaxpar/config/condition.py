"""Conditions on a config, with the options that end them: what `incompatible.py` combines."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpar.components.model import Layer
from jaxpar.config import Config, default_of, flag, value_of
from jaxpar.config.fields import switch_of
from jaxpar.config.listed import is_list, written
from jaxpar.config.values import FIELDS, OR_NAMES

#: A field that has its default.
_DEFAULT: Any = object()


@dataclass(frozen=True, eq=False)
class Condition:
    """What a config may set or contain."""

    label: str
    """As a page names it, in Markdown."""
    holds: Callable[[Config], bool]
    named: Callable[[Config], tuple[str, Any]]
    """The field that an error names, and its value."""
    off: Callable[[Config], tuple[str, ...]]
    """Options, each of which ends the condition."""

    def words(self, cfg: Config) -> str:
        """Return the condition as the rule of an error names it."""
        path, value = self.named(cfg)
        return f"{path} = {value}"


def where(label: str, path: str, holds: Callable[[Any], Any], better: Any = _DEFAULT) -> Condition:
    """A field has a value of some kind, in a section that is set.

    Args:     better: of the fix, in place of the default.
    """
    default = default_of(path) if better is _DEFAULT else better
    section = path.rpartition(".")[0]
    in_python = path in FIELDS and path not in OR_NAMES  # values are set in Python alone
    fixes = () if in_python else (flag(path, default),)
    return Condition(
        label,
        lambda cfg: value_of(cfg, section) is not None and bool(holds(value_of(cfg, path))),
        lambda cfg: (path, _shown(value_of(cfg, path))),
        lambda cfg: fixes,
    )


def changed(path: str, plain: Any = _DEFAULT) -> Condition:
    """A field differs from its default, or from `plain`."""
    none = default_of(path) if plain is _DEFAULT else plain
    return where(f"`{path}`", path, lambda value: value != none, none)


def enabled(section: str) -> Condition:
    """An optional section is set. Errors name its first field."""
    path = switch_of(section)
    return Condition(
        f"`{section}`",
        lambda cfg: value_of(cfg, section) is not None,
        lambda cfg: (path, value_of(cfg, path)),
        lambda cfg: (flag(section, None),),
    )


def equal(path: str, *values: Any, better: Any = _DEFAULT) -> Condition:
    """A field has one of some values. Args:     better: of the fix, in place of the default."""
    label = f"`{path}` " + " or ".join(f"`{value}`" for value in values)
    return where(label, path, lambda value: value in values, better)


def unequal(path: str, *values: Any) -> Condition:
    """A field has none of some values, of which the first is the fix."""
    label = f"`{path}` other than " + ", ".join(f"`{value}`" for value in values)
    return where(label, path, lambda value: value not in values, values[0])


def both(one: Condition, other: Condition) -> Condition:
    """Both hold; errors name the first."""
    return Condition(
        f"{one.label} and {other.label}",
        lambda cfg: one.holds(cfg) and other.holds(cfg),
        one.named,
        lambda cfg: one.off(cfg) + other.off(cfg),
    )


def some_layer(
    label: str, part: str, holds: Callable[[Layer], bool], plain: Any = _DEFAULT
) -> Condition:
    """Some layer of the model has a part that is of a kind.

    Args:
        part: the field of the layer, such as "mixer" or "mixer.sinks".
        plain: the value of the part otherwise, unless other layers are needed.
    """

    def named(cfg: Config) -> tuple[str, Any]:
        layer = next(layer for layer in cfg.model.layers if holds(layer))
        address = f"model.{layer.name}.{part}"
        return address, _shown(functools.reduce(getattr, part.split("."), layer))

    def off(cfg: Config) -> tuple[str, ...]:
        layers = filter(holds, cfg.model.distinct)
        every = " ".join(flag(f"model.{layer.name}.{part}", plain) for layer in layers)
        return () if plain is _DEFAULT else (every,)

    return Condition(label, lambda cfg: any(map(holds, cfg.model.distinct)), named, off)


def of_model(label: str, holds: Callable[[Config], bool]) -> Condition:
    """A condition on all layers of the model."""
    named = lambda cfg: ("model.layers", ", ".join(cfg.model.stacks))  # noqa: E731
    return Condition(label, holds, named, lambda cfg: ())


def _shown(value: Any) -> Any:
    """Return a list as on a command line, and a value of a user's class by its name."""
    if is_list(value):
        return written(value)
    if isinstance(value, tuple):
        return ", ".join(type(one).__name__ for one in value)
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else type(value).__name__
