"""Seeded damage to a valid JSON document, for tests of what reads it.

    for name, text in damaged({"key": 1}, seed=0, count=100):
        path.write_bytes(text)
        assert_refused_or_read(...)  # never a traceback

The same seed gives the same texts, so that a failure can be repeated by its name.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

#: Values that stand where others should: every JSON type, at and beyond the usual limits.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "a", "1", "\x00", "a" * 100_000, "\ud800", "../../etc"),
    *([], [None], [0], [[]], ["a"], {}, {"a": None}, {"": {}}, [{}], {"a": [1]}),
    *([0] * 10_000, -0.0, 1e-320),
)

#: Levels of a value that is nested deeper than any reader allows.
DEEP = 100_000

#: Text that takes the place of `_HOLE` in the document.
_HOLE = "\x01hole\x01"


def damaged(document: Any, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield damaged copies of a JSON document, with a name for each.

    Args:     document: what a reader accepts: an object, usually. count: number of copies.
    """
    draw = random.Random(seed)
    paths = [path for path in _paths(document) if path]
    for i in range(count):
        how, text = draw.choice(_KINDS)(document, paths, draw)
        yield f"{seed}.{i}: {how}", text


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value within a document; the first few of a long list."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value)
    elif isinstance(value, list):
        inner = list(range(min(len(value), 3)))
    return [at, *(path for key in inner for path in _paths(value[key], (*at, key)))]


def _with(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a document with another value at a path."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = _with(document[path[0]], path[1:], value)
    return copy


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _another_value(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    path, value = draw.choice(paths), draw.choice(ODD_VALUES)
    return f"{path} is {repr(value)[:40]}", _text(_with(document, path, value))


def _two_others(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    if not isinstance(document, dict):
        return _another_value(document, paths, draw)
    keys = draw.sample(sorted(document), min(2, len(document)))
    values = {key: draw.choice(ODD_VALUES) for key in keys}
    return f"{repr(values)[:80]}", _text(document | values)


def _missing(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    path = draw.choice(paths)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    rest = holder.copy()
    del rest[path[-1]]
    return f"{path} is missing", _text(_with(document, path[:-1], rest))


def _swapped(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    one, other = draw.choice(paths), draw.choice(paths)
    value: Any = document
    for key in other:
        value = value[key]
    return f"{one} is the value of {other}", _text(_with(document, one, value))


def _deep(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    path, (left, right) = draw.choice(paths), draw.choice((("[", "]"), ('{"a":', "}")))
    levels = draw.choice((65, DEEP))
    text = _text(_with(document, path, _HOLE)).decode()
    nested = left * levels + "1" + right * levels
    return f"{path} has {levels} levels", text.replace(json.dumps(_HOLE), nested).encode()


def _cut(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    text = _text(document)
    end = draw.randrange(len(text))
    return f"cut after {end} bytes", text[:end]


def _bytes(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    text = bytearray(_text(document))
    for _ in range(draw.randint(1, 8)):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return "other bytes", bytes(text)


def _whole(document: Any, paths: list, draw: random.Random) -> tuple[str, bytes]:
    value = draw.choice(ODD_VALUES)
    return f"the document is {repr(value)[:40]}", _text(value)


#: Each kind of damage, the most fruitful more than once.
_KINDS = (
    *[_another_value] * 6,
    *[_two_others] * 2,
    *[_missing] * 2,
    *(_swapped, _deep, _cut, _bytes, _whole),
)
