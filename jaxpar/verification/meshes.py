"""The meshes that are compared, read and resolved."""

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any

from jaxpar.config import Config, ConfigError, ParallelConfig
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import axis_sizes


def parse_meshes(items: Sequence[str], parallel: ParallelConfig) -> dict[str, ParallelConfig]:
    """The parallel section of each mesh item: `parallel`, with every axis 1 unless named."""
    ones = dict.fromkeys((*AXES, "virtual_stages"), 1)
    return {item: dataclasses.replace(parallel, **ones | _parse_mesh(item)) for item in items}


def refuse_rounding(meshes: dict[str, ParallelConfig], parallel: ParallelConfig) -> None:
    """Raise ConfigError for a mesh that would round what float32 does not: `parity.float32` resets
    such fields of the config, and what they need of the model with them."""
    for name, mesh in meshes.items():
        for field in ("gather_dtype", "grad_reduce"):
            value = getattr(mesh, field)
            if value != getattr(parallel, field):
                rule = f"sets {field}, and verify compares in float32"
                raise ConfigError("--mesh", name, rule, f"leave out {field}={value}")


def _parse_mesh(text: str) -> dict[str, Any]:
    hints, values = typing.get_type_hints(ParallelConfig), {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name not in hints or not value:
            fix = f"join items such as data=2 by commas, with names from {', '.join(hints)}"
            raise ConfigError("--mesh", text, f"{item!r} is no field=value", fix)
        if name in values:
            raise ConfigError("--mesh", text, f"{name} is given twice", "give it once")
        values[name] = _typed(text, name, value, hints[name])
    return values


def _typed(text: str, name: str, value: str, hint: Any) -> int | str:
    """A field's value: whole numbers above 0 where the field is a number."""
    if hint is str or isinstance(next(iter(typing.get_args(hint)), None), str):
        return value
    if not value.isdecimal() or int(value) == 0:
        rule = f"{name} must be a whole number above 0"
        raise ConfigError("--mesh", text, rule, f"use {name}=2")
    return int(value)


def num_devices(parallel: ParallelConfig) -> int:
    """Devices that a mesh takes."""
    return math.prod(axis_sizes(parallel))


def resolve_meshes(
    cfg: Config, meshes: dict[str, ParallelConfig], available: int, *, given: bool
) -> dict[str, Config]:
    """The resolved config of each mesh.

    Raises:   ConfigError for a mesh that was asked for and cannot be. Of the default ones, those
              are left out, and it is said why, unless they are only too large; what is wrong
              with all of them alike is raised.
    """
    configs: dict[str, Config] = {}
    left_out: dict[str, ConfigError] = {}
    for name, parallel in meshes.items():
        needed = num_devices(parallel)
        try:
            if needed > available:
                rule = f"needs {needed} devices, and there are {available}"
                raise ConfigError("--mesh", name, rule, f"simulate them with --devices {needed}")
            configs[name] = resolve(dataclasses.replace(cfg, parallel=parallel), needed)
        except ConfigError as error:
            if given:
                raise
            if needed <= available:
                left_out[name] = error
    if not configs and len(set(map(str, left_out.values()))) == 1:
        raise next(iter(left_out.values()))  # of the config, whatever the mesh
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    if not configs:
        raise ConfigError("--mesh", None, "no default mesh fits this config", "add --shrink")
    return configs
