"""The fields that a layout sets, and those that a config fixes."""

import typing
from typing import Any

from jaxpar.config import Config, default_of
from jaxpar.config.schema.parallel import LayoutField

#: `parallel.auto` for all fields that have their defaults, and the fields that a layout sets.
ALL, *FIELDS = typing.get_args(LayoutField)


def fixed_layout_fields(cfg: Config) -> dict[str, Any]:
    """Return the layout fields that `parallel.auto` does not choose, by name."""
    names = cfg.parallel.auto
    values = {name: getattr(cfg.parallel, name) for name in FIELDS}
    if ALL in names:
        return {name: v for name, v in values.items() if v != default_of(f"parallel.{name}")}
    free = [*names, "data"] if cfg.parallel.data == -1 else names
    return {name: value for name, value in values.items() if name not in free}
