"""The rules that the items of each list declare: how many, in which order, none of them twice."""

import itertools
from collections.abc import Iterator
from typing import Any

from jaxpar.config import Config, ConfigError, flag, value_of
from jaxpar.config.fields import field_types, refused
from jaxpar.config.listed import Item, has_fields, hints_of, item_of, plain


def items(cfg: Config) -> Iterator[ConfigError]:
    """Yield an error for each list that breaks what its items declare."""
    for path, hint in field_types().items():
        item = item_of(hint)
        if not has_fields(item) or not isinstance(held := _held(cfg, path), tuple) or not held:
            continue
        if len(held) > item.most:
            rule = f"has {len(held)} items, more than {item.most}"
            yield refused(path, held, rule, flag(path, held[: item.most]))
        texts = [name for name, of in hints_of(item).items() if plain(of) is str]
        for i, name in itertools.product(range(len(held)), texts):
            if not getattr(held[i], name).strip():
                left = (*held[:i], *held[i + 1 :])
                yield refused(f"{path}[{i}].{name}", "", "must not be empty", flag(path, left))
        yield from _keys(path, item, held)


def _held(cfg: Config, path: str) -> Any:
    section = path.rpartition(".")[0]
    return () if value_of(cfg, section) is None else value_of(cfg, path)


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
