"""The rules that lists and their items declare: ranges, how many, in which order, none twice."""

import functools
from collections.abc import Iterator
from typing import Any

from jaxpar.components.ranges import declared_range
from jaxpar.config import Config, ConfigError, flag, value_of
from jaxpar.config.fields import annotation_of, field_types, refused
from jaxpar.config.listed import (
    Item,
    good_number,
    has_fields,
    hints_of,
    item_of,
    parts_of,
    plain,
    with_parts,
)
from jaxpar.config.rules.numbers import broken_range


def items(cfg: Config) -> Iterator[ConfigError]:
    """Yield the first error of each list. Its fix mends all items that have it."""
    for path, item in _lists():
        section = path.rpartition(".")[0]
        held = () if value_of(cfg, section) is None else value_of(cfg, path)
        if not isinstance(held, tuple) or not held:
            continue
        found = list(_numbers(path, held))
        if not found and has_fields(item):
            found = [*_number_of_items(path, item, held), *_texts(path, item, held)]
            found = found or list(_keys(path, item, held))
        yield from found[:1]


@functools.cache
def _lists() -> list[tuple[str, Any]]:
    """Return the paths of all lists, with the types of their items."""
    found = ((path, item_of(hint)) for path, hint in field_types().items())
    return [(path, item) for path, item in found if item is not None]


def _numbers(path: str, held: tuple[Any, ...]) -> Iterator[ConfigError]:
    mend = lambda one, of: good_number(of) if broken_range(one, declared_range(of)) else one  # noqa: E731
    hint = annotation_of(path)
    for where, value, of in parts_of(held, hint, path):
        if rule := broken_range(value, declared_range(of)):
            yield refused(where, value, rule, flag(path, with_parts(held, hint, mend)))


def _number_of_items(path: str, item: type[Item], held: tuple[Any, ...]) -> Iterator[ConfigError]:
    if len(held) > item.most:
        rule = f"has {len(held)} items, more than {item.most}"
        yield refused(path, held, rule, flag(path, held[: item.most]))


def _texts(path: str, item: Any, held: tuple[Any, ...]) -> Iterator[ConfigError]:
    names = [name for name, of in hints_of(item).items() if plain(of) is str]
    empty = [(i, n) for i, one in enumerate(held) for n in names if not getattr(one, n).strip()]
    left = tuple(one for i, one in enumerate(held) if i not in dict(empty))
    for i, name in empty:
        yield refused(f"{path}[{i}].{name}", "", "must not be empty", flag(path, left))


def _keys(path: str, item: type[Item], held: tuple[Any, ...]) -> Iterator[ConfigError]:
    """Yield the error of a list with items of one key, or whose keys do not grow."""
    keys = [getattr(one, item.key) for one in held] if item.key else []
    once = dict(zip(keys[::-1], held[::-1], strict=False))  # the first one of each key
    others = [key for i, key in enumerate(keys) if key in keys[:i]]
    if others:
        rule = f"has the {item.key} {others[0]} twice"
        way = tuple(once[key] for key in dict.fromkeys(keys))
        yield refused(path, held, rule, flag(path, way))
    elif item.ascending and keys != sorted(keys):
        rule = f"must have ascending {item.key}s, but has {', '.join(map(str, keys))}"
        yield refused(path, held, rule, flag(path, tuple(once[key] for key in sorted(keys))))
