"""The fields of a dataclass of options: names, types, marks, defaults and meanings."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.fields import meanings_of
from jaxpar.config.listed import members
from jaxpar.config.rules.limits import Range

#: Options that hold a path, beside all positional arguments. Others may hold a text, such as a
#: prompt, which can be an address.
PATHS = {"certificate", "data", "include_path", "input", "json", "output", "plot"}

#: Marks an argument that may also be the address of a run in an object store
#: (`stores.reading.with_local_runs`).
OR_ADDRESS = "or the address of a run"

#: Marks an argument that may also be another address: of a folder to write, or a published model.
TO_ADDRESS = "or another address"

type Step = int | Literal["best"] | None
"""A checkpoint to read: a step, the best one, or None for the latest intact one."""

#: The options of a command: one dataclass, or several by the name of a subcommand, or of a use such
#: as "--chat".
type Forms = type | Mapping[str, type]


@dataclass(frozen=True)
class Argument:
    """Marks a field as a positional argument."""

    name: str
    """As in the usage: RUN."""


@dataclass(frozen=True)
class OnlyFields:
    """Marks a field of type `ConfigArguments`: there is no CONFIG, and only some fields are set."""

    paths: tuple[str, ...]
    """Fields, or whole sections."""


@dataclass(frozen=True)
class Written:
    """How an option is written: the name of its value in --help, and a short form, -n."""

    value: str = ""
    short: str = ""
    example: str = ""
    """A value that works, for errors."""


@dataclass(frozen=True)
class Declared:
    """A field of a dataclass of options."""

    field: str
    hint: Any
    marks: tuple[Any, ...]
    default: Any
    meaning: str
    group: str = ""
    """The field of the dataclass that it is a field of: options that several commands share."""

    @property
    def argument(self) -> str:
        """Its name as a positional argument; "" for an option."""
        return next((mark.name for mark in self.marks if isinstance(mark, Argument)), "")

    @property
    def name(self) -> str:
        """As on a command line: --max-tokens, or RUN."""
        return self.argument or "--" + self.field.replace("_", "-")

    @property
    def written(self) -> Written:
        """How it is written."""
        return next((mark for mark in self.marks if isinstance(mark, Written)), Written())

    @property
    def item(self) -> Any:
        """The type of one value."""
        return typing.get_args(self.hint)[0] if self.takes_several else self.hint

    @property
    def takes_several(self) -> bool:
        """Whether it is a tuple."""
        return typing.get_origin(self.hint) is tuple

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    def example(self) -> str:
        """Return it with a value that is accepted."""
        ranges = (mark.good for mark in self.marks if isinstance(mark, Range))
        choices = [str(one) for one in members(self.item) if one is not NoneType]
        usual = "" if self.required or self.takes_several or self.default is None else self.default
        literal = not any(isinstance(one, type) for one in members(self.item))
        usual = self.written.example or next(ranges, None) or usual
        made = usual or (choices[0] if literal else self.value_name())
        return str(made) if self.argument else f"{self.name} {made}"

    def value_name(self) -> str:
        """Return the name of its value in the usage."""
        if self.written.value or self.argument:
            return self.written.value or self.argument
        names = {int: "N", float: "X", str: "TEXT"}
        kinds = [names.get(one, str(one)) for one in members(self.item) if one is not NoneType]
        choices = "{" + ",".join(kinds) + "}"
        return choices if not set(kinds) & set(names.values()) else "|".join(kinds)


@functools.cache
def declared(form: type) -> tuple[Declared, ...]:
    """Return the options of a dataclass, but for the one of type `ConfigArguments`.

    The fields of a dataclass within it are among them.
    """
    texts = meanings_of(form)
    hints, found = typing.get_type_hints(form, include_extras=True), list[Declared]()
    for field in dataclasses.fields(form):
        hint, marks = hints[field.name], list[Any]()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        hint = _resolved(hint)
        if hint is ConfigArguments:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found += (dataclasses.replace(one, group=field.name) for one in declared(hint))
            continue
        text = texts.get(field.name, "")
        found.append(Declared(field.name, hint, tuple(marks), field.default, text))
    return tuple(found)


def _resolved(hint: Any) -> Any:
    """Return a type without names that `type X = ...` gives."""
    hint = getattr(hint, "__value__", hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_resolved, typing.get_args(hint)))]  # noqa: UP007
    return hint


def value_in(options: Any, one: Declared) -> Any:
    """Return the value of an option in a dataclass of them."""
    return getattr(getattr(options, one.group) if one.group else options, one.field)


@functools.cache
def config_field(form: type) -> dataclasses.Field[Any] | None:
    """Return the field of a dataclass that is CONFIG with its overrides, if it has one."""
    hints, fields = typing.get_type_hints(form), dataclasses.fields(form)
    return next((field for field in fields if hints[field.name] is ConfigArguments), None)


def only_fields(form: type) -> tuple[str, ...]:
    """Return the fields and sections to which `OnlyFields` limits a command; empty: no limit."""
    config = config_field(form)
    if config is None:
        return ()
    marks = getattr(
        typing.get_type_hints(form, include_extras=True)[config.name], "__metadata__", ()
    )
    return next((mark.paths for mark in marks if isinstance(mark, OnlyFields)), ())
