"""Check that each number is in the range that its field declares."""

import math
from collections.abc import Iterator
from typing import Any

from jaxpar.components.ranges import MAX_INT, Range
from jaxpar.config import Config, ConfigError, default_of, flag, value_of
from jaxpar.config.fields import field_types, range_of, refused, turning_off
from jaxpar.config.layers import numbers_in_layers

#: Of whole numbers whose field declares none.
_ANY = Range(-MAX_INT - 1, MAX_INT)


def numbers(cfg: Config) -> list[ConfigError]:
    """Return an error for each number that is not in its range."""
    return [
        refused(path, value, rule, fix, *turning_off(path)) for path, value, rule, fix in _bad(cfg)
    ]


def _bad(cfg: Config) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the path and value of each number that breaks a rule, the rule and a fix."""
    for path in field_types():
        value, allowed, default = value_of(cfg, path), range_of(path), default_of(path)
        if path == "parallel.data" and value < 1 and value != -1:
            yield (
                path,
                value,
                "must be at least 1, or -1 for all remaining devices",
                flag(path, default),
            )
        elif rule := broken_range(value, allowed):
            optional = ", or None" if default is None and "at most" not in rule else ""
            yield path, value, rule + optional, flag(path, default)
    for path, value, allowed, default in numbers_in_layers(cfg.model.layers):
        if rule := broken_range(value, allowed):
            yield path, value, rule, flag(path, default)


def broken_range(value: Any, allowed: Any) -> str:
    """Return the rule that a number breaks; "" for one in its range, and for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    allowed = allowed or (_ANY if isinstance(value, int) else None)
    return "" if allowed is None or value in allowed else allowed.rule(value)
