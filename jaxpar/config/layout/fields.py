"""The fields that a layout sets, and those that a config fixes."""

from typing import Any

from jaxpar.config import Config, default_of

#: The fields that a layout sets, in display order.
FIELDS = (
    "pipeline replica data expert sequence tensor "
    "zero num_microbatches virtual_stages row_groups remat"
).split()


#: The value of `parallel.auto` for all fields that have their defaults.
ALL = "all"


def names_of(auto: str) -> list[str]:
    """Return the names in `parallel.auto`."""
    return [name.strip() for name in auto.split(",") if name.strip()]


def fixed_layout_fields(cfg: Config) -> dict[str, Any]:
    """Return the layout fields that `parallel.auto` does not choose, by name."""
    names = names_of(cfg.parallel.auto)
    values = {name: getattr(cfg.parallel, name) for name in FIELDS}
    if ALL in names:
        return {name: v for name, v in values.items() if v != default_of(f"parallel.{name}")}
    free = [*names, "data"] if cfg.parallel.data == -1 else names
    return {name: value for name, value in values.items() if name not in free}
