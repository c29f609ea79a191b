"""Values of users' own classes in a config: losses, probes, post-updates, callbacks.

A config holds such a value as it is. JSON has the name of its class and its fields, and reading it
back imports no code: it gives a `SavedValue`, which programs that only look at a run need not
understand.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, dataclass_transform

from jaxpar.components.model import Layer
from jaxpar.config import layers
from jaxpar.config.errors import ConfigError
from jaxpar.config.names import name_of

#: The key of the class among the fields of a value in JSON.
CLASS = "class"

#: The fields of a config that hold values: their `Value.kind`, and whether there are several.
FIELDS = {
    "train.loss": ("Loss", False),
    "train.probes": ("Probe", True),
    "train.post_updates": ("PostUpdate", True),
    "train.callbacks": ("Callback", True),
    "optimizer.name": ("UpdateRule", False),
    "optimizer.schedule": ("Schedule", False),
    "data.source": ("DataSource", False),
    "metrics.sinks": ("MetricSink", True),
}

#: Those that hold the name of one of jaxpar's in place of a value.
OR_NAMES = ("optimizer.name", "optimizer.schedule")

#: Those that are part of a step.
OF_STEPS = (
    "train.loss",
    "train.probes",
    "train.post_updates",
    "optimizer.name",
    "optimizer.schedule",
)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value:
    """Base of the classes whose values a config may hold.

    A subclass is made a frozen dataclass, without a decorator: its annotations are its fields,
    which are keyword arguments. Their values are numbers, texts, booleans, None, functions, or
    tuples of them.
    """

    kind: ClassVar[str] = ""
    """The name of its base class in `import jaxpar`."""
    reads: ClassVar[tuple[str, ...]] = ()
    """What it reads of a batch beside tokens and labels: "source" is the index of each token's
    source in a mixture."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for base in reversed(cls.__mro__[1:]):  # whose fields a decorator of this class reads
            _as_dataclass(base)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        _as_dataclass(cls)
        return super().__new__(cls)

    def check(self, cfg: Any, path: str) -> None:
        """Check that the config that holds the value goes with it.

        Args:     cfg: a Config. path: of the field that holds the value.
        Raises:   ConfigError.
        """


def _as_dataclass(cls: Any) -> None:
    """Make a subclass of `Value` a dataclass, unless a decorator has.

    That is when it is first used, since a decorator comes after `__init_subclass__`.
    """
    if not issubclass(cls, Value) or cls is Value or "__dataclass_fields__" in cls.__dict__:
        return
    for field in getattr(cls, "__dataclass_fields__", {}).values():  # of its bases
        if field.name in cls.__dict__:  # `name = value` is another default
            cls.__annotations__.setdefault(field.name, field.type)
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def fields_of(cls: type[Value]) -> tuple[dataclasses.Field, ...]:
    """Return the fields of a class of values."""
    _as_dataclass(cls)
    found: Any = cls
    return dataclasses.fields(found)


class SavedValue(Value):
    """A value as a run has saved it, of a class whose code is not loaded."""

    name: str
    """The name of its class, as `class_name` returns it."""
    fields: tuple[tuple[str, Any], ...] = ()


def class_name(value: Any) -> str:
    """Return the name of a value's class: `module:Class`, or `file.py:Class`."""
    return value.name if isinstance(value, SavedValue) else name_of(type(value))


def to_values(node: Any) -> Any:
    """Return a config, or a part of it, as JSON's types: `dataclasses.asdict`, with values."""
    if isinstance(node, SavedValue):
        return {CLASS: node.name, **dict(node.fields)}
    if isinstance(node, Value) and not getattr(node, "section", ""):
        return {CLASS: class_name(node), **_fields(node)}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return _fields(node)
    if isinstance(node, tuple) and node and isinstance(node[0], Layer):
        return layers.to_values(node)
    if isinstance(node, tuple):
        return [to_values(one) for one in node]
    return name_of(node) if callable(node) else node


def _fields(node: Any) -> dict[str, Any]:
    return {f.name: to_values(getattr(node, f.name)) for f in dataclasses.fields(node)}


def from_saved(found: Any, path: str) -> SavedValue:
    """Return a value of JSON.

    Raises:   ConfigError for another form.
    """
    if not isinstance(found, dict) or not isinstance(found.get(CLASS), str):
        rule = 'must be an object with the name of a class, "class"'
        raise ConfigError(path, found, rule, "use the config file that the run was started with")
    fields = {name: _hashable(value) for name, value in found.items() if name != CLASS}
    return SavedValue(name=found[CLASS], fields=tuple(fields.items()))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def check_values(path: str, given: Any) -> None:
    """Check the values of a field of FIELDS.

    Raises:   ConfigError for another kind, and for a value that is not hashable.
    """
    kind, several = FIELDS[path]
    name = path.rpartition(".")[2]
    fix = f"set {name}={'(' if several else ''}MyOwn(){',)' if several else ''} in a config file"
    if several and not isinstance(given, tuple):
        raise ConfigError(path, given, f"must be a tuple of jaxpar.{kind}", fix)
    for value in given if several else (given,) if given is not None else ():
        if isinstance(value, type) and issubclass(value, Value):
            rule = f"is a class, not a value of it: must be a jaxpar.{kind}"
            raise ConfigError(path, value.__name__, rule, f"use a value, {value.__name__}()")
        if not isinstance(value, SavedValue) and getattr(value, "kind", None) != kind:
            what = " or a name" if path in OR_NAMES else "" if several else " or None"
            raise ConfigError(path, value, f"must be a jaxpar.{kind}{what}", fix)
        for field in dataclasses.fields(value):
            where = f"{path}: {type(value).__name__}.{field.name}"
            _check_field(where, getattr(value, field.name))


def _check_field(where: str, held: Any) -> None:
    """Raises:   ConfigError for what cannot be compiled for, or named in JSON."""
    try:
        dict.fromkeys([held])
    except TypeError:
        rule = "must be hashable, as programs are compiled for it"
        raise ConfigError(where, held, rule, "use a number, a text or a tuple") from None
    if callable(held) and "<" in (name := getattr(held, "__qualname__", "<no name>")):
        rule = "has no name by which --code finds it in a file"
        raise ConfigError(where, name, rule, "define it by `def` at the top of the file")


def require_code(cfg: Any, paths: Iterable[str] = FIELDS) -> None:
    """Raises:   ConfigError for a value of a config whose class is not loaded.

    Args:     paths: of the fields to look at.
    """
    for path in paths:
        section, _, name = path.partition(".")
        held = getattr(getattr(cfg, section), name)
        for value in held if isinstance(held, tuple) else (held,):
            if isinstance(value, SavedValue):
                raise unknown_code(path, value)


def unknown_code(path: str, value: Any) -> ConfigError:
    """Return the error for a value whose class is not loaded."""
    rule = "is of a class whose code is not loaded"
    where = class_name(value).rpartition(":")[0]
    fix = f"use --code {where}, or the config file that the run was started with"
    return ConfigError(path, class_name(value), rule, fix)
