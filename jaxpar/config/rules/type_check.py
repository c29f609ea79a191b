"""Check the types of a config's values: the first rule of `validate.py`."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jaxpar.components.model import Layer
from jaxpar.config import Config, ConfigError, default_of, flag
from jaxpar.config.fields import field_types, section_of
from jaxpar.config.layers import FIELD, check_layers
from jaxpar.config.listed import (
    closest_list,
    form,
    has_fields,
    hints_of,
    item_of,
    members,
    plain,
    read_list,
)
from jaxpar.config.numerals import number
from jaxpar.config.values import OR_NAMES, Value, check_values


def wrong_types(cfg: Config) -> list[ConfigError]:
    """Return an error for each field whose value has the wrong type."""
    return list(_wrong(cfg, ""))


def wrong_sections(cfg: Config) -> list[ConfigError]:
    """Return the errors of sections, and of layers as a whole: no field of them can be changed."""
    known = field_types()
    whole = {path for path, hint in known.items() if path == FIELD or section_of(hint)}
    return [error for error in wrong_types(cfg) if error.field in whole]


def _wrong(node: Any, prefix: str) -> Iterator[ConfigError]:
    for field in dataclasses.fields(node):
        value, path = getattr(node, field.name), prefix + field.name
        try:
            check_type(path, value)
        except ConfigError as error:
            yield error
            continue
        if value is not None and section_of(field_types()[path]) is not None:
            yield from _wrong(value, f"{path}.")


def check_type(path: str, value: Any) -> None:
    """Raise ConfigError if a field cannot have a value, because of its type."""
    hint = field_types()[path]
    if Value in typing.get_args(hint) and not (path in OR_NAMES and isinstance(value, str)):
        check_values(path, value)
    elif Layer in typing.get_args(hint):
        check_layers(value)
    elif not fits(value, hint):
        where, part, inner = _misfit(path, value, hint)
        rule = f"must be {describe(inner)}{_unread(value, hint)}"
        raise ConfigError(where, part, rule, f"use {_example(path, value, hint)}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, a union of types, or one of a Literal."""
    hint = plain(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(value, h) for h in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return any(value == a and type(value) is type(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(fits(one, item) for one in value)
    if has_fields(hint) and isinstance(value, hint):
        return all(fits(getattr(value, name), inner) for name, inner in hints_of(hint).items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _misfit(path: str, value: Any, hint: Any) -> tuple[str, Any, Any]:
    """Return the first part of a list that is not of its type: where, its value, and the type."""
    if has_fields(hint) and isinstance(value, hint):
        parts = [
            (f"{path}.{name}", getattr(value, name), of) for name, of in hints_of(hint).items()
        ]
    elif isinstance(value, tuple) and item_of(hint) is not None:
        parts = [(f"{path}[{i}]", one, item_of(hint)) for i, one in enumerate(value)]
    else:
        return path, value, hint
    return next(_misfit(*part) for part in parts if not fits(part[1], part[2]))


def _unread(value: Any, hint: Any) -> str:
    """Return why a text is not a list, as the end of a rule."""
    if isinstance(value, str) and has_fields(item := item_of(hint)):
        try:
            read_list(value, item)
        except ValueError as error:
            return f", but {error}"
    return ""


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "names"}


def describe(hint: Any) -> str:
    """Return a type in words: "a whole number or None"."""
    hint = plain(hint)
    if Layer in typing.get_args(hint):
        return "layers of components"
    names = next((one for one in typing.get_args(hint) if typing.get_origin(one) is Literal), None)
    if Value in typing.get_args(hint) and names:
        return describe(names)
    if Value in typing.get_args(hint):
        several = typing.get_origin(hint) is tuple
        return (
            "values of classes of your own" if several else "a value of a class of your own or None"
        )
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        names = ", ".join(one for one in members(item) if isinstance(one, str))
        what = form(item) if has_fields(item) else _PLURALS.get(item, "numbers")
        what = f"names from {names}" if names else what
        return f"a list of {what}, separated by commas"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(describe(h) for h in typing.get_args(hint))
    return "None" if hint is type(None) else _KINDS.get(hint, f"a {hint.__name__}")


def _example(path: str, value: Any, hint: Any) -> str:
    """Return a setting of the right type: the most similar value, or the default."""
    section = section_of(hint)
    if section is not None:
        inner = next(p for p in field_types() if p.startswith(path + "."))
        fields = flag(inner, default_of(inner))
        return fields if section is hint else f"{flag(path, None)}, or {fields}"
    if (item := item_of(hint)) is not None:
        words = [one for one in members(hint) if isinstance(one, str)]
        near = (
            difflib.get_close_matches(str(value), words, n=1)
            if not set(",:") & set(str(value))
            else []
        )
        return flag(path, near[0] if near else _near(value, item) or default_of(path))
    if path in OR_NAMES:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        return flag(path, near[0] if near else default_of(path))
    if hint in (int, float) and isinstance(value, str | float):
        try:
            meant = number(value) if isinstance(value, str) else value
        except ValueError:
            meant = math.nan
        if meant.is_integer():
            return flag(path, int(meant))
    return flag(path, default_of(path))


def _near(value: Any, item: Any) -> tuple[Any, ...]:
    """Return the items of a list that are of their type, and the most similar names of others."""
    if isinstance(value, str) and has_fields(item):
        return closest_list(value, item)
    values = value.split(",") if isinstance(value, str) else value
    names = [one for one in members(item) if isinstance(one, str)]
    found: list[Any] = []
    for one in values if isinstance(values, list | tuple) else ():
        if fits(one, item):
            found.append(one)
        elif isinstance(one, str):
            found += difflib.get_close_matches(one.strip(), names, n=1)
    return tuple(found)
