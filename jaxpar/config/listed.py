"""How the values of fields are written on a command line, and read: one grammar for all types.

Commas separate the items of a list, and colons the fields of an item, a frozen dataclass, in their
order: `data/web:0.7,data/code:0.3`. Fields at the end that have defaults may be left out, and an
empty one has its default. The last text of an item takes the colons that the other fields leave, so
that it may be an address. Brackets hold a list within an item, as in `1000:[1,3]`, or a text with
commas. An empty text is a list without items.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from jaxpar.components.ranges import Range, Reals, declared_range
from jaxpar.config.numerals import number, whole_number


@dataclass(frozen=True)
class Item:
    """Base of the dataclasses that lists of a config consist of (`schema/items.py`)."""

    most: ClassVar[int] = 100
    """Most items of a list."""
    key: ClassVar[str] = ""
    """The field that has another value in each item."""
    ascending: ClassVar[bool] = False
    """Whether the values of `key` grow."""


# ------------------------------------------------------------------------------- types of fields


def plain(hint: Any) -> Any:
    """Return the type of which a hint is an alias, or the hint; without a range."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return hint.__value__ if isinstance(hint, typing.TypeAliasType) else hint


def members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union or a Literal, of all levels. A list is one."""
    hint = plain(hint)
    parts = () if typing.get_origin(hint) is tuple else typing.get_args(hint)
    for part in parts:
        yield from members(part) if typing.get_args(plain(part)) else [part]
    if not parts:
        yield hint


def has_fields(hint: Any) -> bool:
    """Return whether a type is the class of items with fields."""
    return isinstance(hint, type) and issubclass(hint, Item)


def item_of(hint: Any) -> Any:
    """Return the type of the items of a field that is, or may be, a list.

    None for other fields, and for lists of users' own values.
    """
    lists = (one for one in members(hint) if typing.get_origin(one) is tuple)
    item = next((typing.get_args(one)[0] for one in lists), None)
    if item is None or has_fields(item):
        return item
    return item if all(one in _READERS or isinstance(one, str) for one in members(item)) else None


@functools.cache
def hints_of(item: Any) -> dict[str, Any]:
    """Return the types of the fields of an item's class, with their ranges, in order."""
    hints = typing.get_type_hints(item, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(item)}


def good_number(hint: Any) -> int | float | None:
    """Return a number that a field may have; None for a field of another type."""
    kinds = [one for one in members(hint) if one in (int, float)]
    match declared_range(hint):
        case Range() as allowed:
            return allowed.good or allowed.least
        case Reals() as allowed:
            return 1.0 if 1.0 in allowed else allowed.least
    return kinds[0](1) if kinds else None


# --------------------------------------------------------------------------------------- reading

_WORDS = {"true": True, "false": False}

#: Parsers of the types that a field can have.
_READERS: Mapping[Any, Callable[[str], Any]] = {
    int: whole_number,
    float: number,
    str: str,
    bool: lambda text: _WORDS[text.lower()],
    NoneType: lambda text: {"none": None}[text.lower()],
}


def read_value(text: str, hint: Any) -> Any:
    """Parse a text as a type. Returns a text that does not parse as it is, for a check of types."""
    for option in members(hint):
        if isinstance(option, str | int) and str(option) == text:
            return option
        try:
            is_list = typing.get_origin(option) is tuple
            return read_list(text, item_of(option)) if is_list else _READERS[option](text)
        except (KeyError, ValueError):
            continue
    return text


def read_list(text: str, item: Any) -> tuple[Any, ...]:
    """Parse a list.

    Args:     item: the type of its items.
    Raises:   ValueError that says in words what is wrong with which item.
    """
    if item is None:
        raise ValueError("is set in Python")
    texts = split(text, ",") if text.strip() else []
    return tuple(_read_item(one.strip(), item) for one in texts)


def closest_list(text: str, item: Any) -> tuple[Any, ...]:
    """Return the items of a text that parse as they are, with the most similar names, or with
    other numbers at the end."""
    hints, found = list(hints_of(item).values()), list[Any]()
    numbers = list(map(good_number, hints[: _required(item)]))
    for one in split(text, ","):
        parts = split(one.strip(), ":")
        for i, (part, hint) in enumerate(zip(parts, hints, strict=False)):
            names = [name for name in members(hint) if isinstance(name, str)]
            parts[i] = next(iter(difflib.get_close_matches(part, names, n=1)), part)
        for kept in range(len(parts), 0, -1):
            more = numbers[kept:]
            if None in more:  # a text, which nobody knows
                break
            try:
                found.append(_read_item(":".join([*parts[:kept], *map(str, more)]), item))
            except ValueError:
                continue
            break
    return tuple(found)


def _required(item: Any) -> int:
    """Return the number of fields without defaults, which are the first ones."""
    return sum(field.default is dataclasses.MISSING for field in dataclasses.fields(item))


def _read_item(text: str, item: Any) -> Any:
    if not has_fields(item):
        return _read_part(text, item)
    fields, hints, parts = dataclasses.fields(item), hints_of(item), split(text, ":")
    required = _required(item)
    if len(parts) < required:
        raise ValueError(f"{text!r} has no {fields[len(parts)].name}")
    texts = [i for i, field in enumerate(fields) if plain(hints[field.name]) is str]
    wrong = []
    for count in range(min(len(fields), len(parts)), required - 1, -1):
        more, at = len(parts) - count, max((i for i in texts if i < count), default=-1)
        given = parts
        if more and at < 0:
            wrong.append(ValueError(f"{text!r} has more than {form(item)}"))
            continue
        if more:
            given = [*parts[:at], ":".join(parts[at : at + more + 1]), *parts[at + more + 1 :]]
        try:
            named = zip(fields, given, strict=False)
            return item(**{f.name: _read_part(one, hints[f.name], f.default) for f, one in named})
        except ValueError as error:
            wrong.append(error)
    raise wrong[0]


def _read_part(text: str, hint: Any, default: Any = dataclasses.MISSING) -> Any:
    """Parse a field of an item, or an item without fields.

    Raises:   ValueError for a text that does not parse.
    """
    if text == "" and default is not dataclasses.MISSING:
        return default
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        if (item := item_of(hint)) is not None:
            return read_list(text, item)
    if plain(hint) is not str and typing.get_origin(plain(hint)) is not tuple:
        value = read_value(text, hint)
        if isinstance(value, str) and value not in members(hint):
            raise ValueError(f"{text[:60]!r} is not {_kind(hint)}")
        return value
    return text if plain(hint) is str else read_list(text, item_of(hint))


def _kind(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "empty"}
    found = [names.get(one, one) for one in members(hint) if one in names or isinstance(one, str)]
    if (item := item_of(hint)) is not None:
        found.append(f"a list of {form(item)}")
    return " or ".join(found)


def split(text: str, separator: str) -> list[str]:
    """Split a text at a separator that is not within brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


# --------------------------------------------------------------------------------------- writing


def is_list(value: Any) -> bool:
    """Return whether a value is a list that can be written, not one of users' own values."""
    kinds = Item | int | float | str
    return isinstance(value, tuple) and all(isinstance(one, kinds) for one in value)


def written(value: Any) -> str:
    """Return a value as on a command line. Reading it returns the same value.

    An item that is one word is in brackets if it is alone: a field may also have words as values.
    """
    if not isinstance(value, tuple):
        return str(value)
    text = _written_items(value)
    is_word = len(value) == 1 and isinstance(value[0], Item) and not set(text) & set(":[")
    return f"[{text}]" if is_word else text


def _written_items(value: tuple[Any, ...]) -> str:
    return ",".join(map(_written_item, value))


def _written_item(item: Any) -> str:
    if not isinstance(item, Item):
        return _written_part(item)
    values = [getattr(item, field.name) for field in dataclasses.fields(item)]
    parts = ["" if value is None else _written_part(value) for value in values]
    for count in range(1, len(parts)):
        text = ":".join(parts[:count])
        if _reads_as(text, item):
            return text
    return ":".join(parts)


def _reads_as(text: str, item: Item) -> bool:
    try:
        return read_list(text, type(item)) == (item,)
    except ValueError:
        return False


def _written_part(value: Any) -> str:
    text = _written_items(value) if isinstance(value, tuple) else str(value)
    return f"[{text}]" if isinstance(value, tuple) or set(text) & set(",[]") else text


def form(item: Any) -> str:
    """Return how an item is written: PATH:WEIGHT, NAME:PATH[:SPLIT], STEP:[WEIGHT,...], {a,b}."""
    if not has_fields(item):
        names = [one for one in members(item) if isinstance(one, str)]
        return f"{{{','.join(names)}}}" if names else "NAME" if item is str else "NUMBER"
    text = ""
    for field in dataclasses.fields(item):
        name, hint = field.name.upper(), plain(hints_of(item)[field.name])
        if typing.get_origin(hint) is tuple:
            name = f"[{name.removesuffix('S')},...]"
        name = f":{name}" * bool(text) or name
        text += name if field.default is dataclasses.MISSING else f"[{name}]"
    return text


def parts_of(value: Any, hint: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a list consists of: the path of each, such as `data.mixture[1].weight`, its value
    and its type."""
    if isinstance(value, tuple):
        inner = item_of(hint)
        for i, one in enumerate(value):
            yield from parts_of(one, inner, f"{path}[{i}]")
    elif isinstance(value, Item):
        kind: Any = type(value)
        for name, inner in hints_of(kind).items():
            yield from parts_of(getattr(value, name), inner, f"{path}.{name}")
    else:
        yield path, value, hint


def with_parts(value: Any, hint: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a list with its parts changed. Args:     change: a part, its type -> another part."""
    if isinstance(value, tuple):
        inner = item_of(hint)
        return tuple(with_parts(one, inner, change) for one in value)
    if isinstance(value, Item):
        kind: Any = type(value)
        hints = hints_of(kind).items()
        made = {name: with_parts(getattr(value, name), of, change) for name, of in hints}
        return dataclasses.replace(value, **made)
    return change(value, hint)
