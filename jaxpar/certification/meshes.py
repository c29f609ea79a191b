"""Parses and resolves the meshes to certify."""

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any

from jaxpar.config import Config, ConfigError, ParallelConfig
from jaxpar.config.fields import range_of
from jaxpar.config.listed import item_of, read_value
from jaxpar.config.numerals import number, only_digits
from jaxpar.config.rules.limits import MAX_CPU_DEVICES
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import axis_sizes


def parse_meshes(items: Sequence[str], parallel: ParallelConfig) -> dict[str, ParallelConfig]:
    """Return the parallel section of each mesh: `parallel`, with axes of 1 unless named.

    Raises:   ConfigError for an unknown field, or a value or a mesh that is too large.
    """
    ones: dict[str, Any] = dict.fromkeys((*AXES, "virtual_stages"), 1) | {"layers_per_stage": ()}
    meshes = {item: dataclasses.replace(parallel, **ones | _parse_mesh(item)) for item in items}
    for item, mesh in meshes.items():
        if num_devices(mesh) > MAX_CPU_DEVICES:
            rule = f"has {num_devices(mesh):,} devices, and must have at most {MAX_CPU_DEVICES:,}"
            raise ConfigError("--mesh", item, rule, "use a smaller mesh of the same axes")
    return meshes


def refuse_rounding(meshes: dict[str, ParallelConfig], parallel: ParallelConfig) -> None:
    """Raise ConfigError for a mesh that sets a field with a rounding dtype.

    `small_config.float32` resets such fields of the config, and the model fields they require.
    """
    for name, mesh in meshes.items():
        for field in ("gather_dtype", "grad_reduce"):
            value = getattr(mesh, field)
            if value != getattr(parallel, field):
                rule = f"sets {field}, but certify compares in float32"
                raise ConfigError("--mesh", name, rule, f"remove {field}={value}")


def _parse_mesh(text: str) -> dict[str, Any]:
    hints, values = typing.get_type_hints(ParallelConfig), {}
    for item in _items(text, hints):
        name, _, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name not in hints or not value:
            fix = f"use items such as data=2, separated by commas, with names {', '.join(hints)}"
            raise ConfigError("--mesh", text, f"{item!r} is not a field=value", fix)
        if name in values:
            raise ConfigError("--mesh", text, f"{name} is given twice", "give it once")
        values[name] = _typed(text, name, value, hints[name])
    return values


def _items(text: str, hints: dict[str, Any]) -> list[str]:
    """Split at commas. What has no "=" continues a text or a list, as in layers_per_stage=3,1."""
    items: list[str] = []
    for item in text.split(","):
        before = items[-1].partition("=")[0].strip().replace("-", "_") if items else ""
        if "=" not in item and _has_commas(hints.get(before)):
            items[-1] += f",{item}"
        else:
            items.append(item)
    return items


def _has_commas(hint: Any) -> bool:
    return hint is str or item_of(hint) is not None


def _typed(text: str, name: str, value: str, hint: Any) -> Any:
    """Parse a field's value; a number must be a positive integer, unless its field is a float."""
    if item_of(hint) is not None:
        return read_value(value, hint)
    if hint is str or isinstance(next(iter(typing.get_args(hint)), None), str):
        return value
    if hint is float:
        try:
            return number(value)
        except ValueError as error:
            raise ConfigError("--mesh", text, f"{name}: {error}", f"use {name}=1.5") from None
    if not only_digits(value) or int(value) == 0:
        rule = f"{name} must be a positive integer"
        raise ConfigError("--mesh", text, rule, f"use {name}=2")
    if (allowed := range_of(f"parallel.{name}")) and int(value) > allowed.most:
        raise ConfigError("--mesh", text, f"{name} {allowed.rule(int(value))}", f"use {name}=2")
    return int(value)


def num_devices(parallel: ParallelConfig) -> int:
    """Return the number of devices of a mesh."""
    return math.prod(axis_sizes(parallel))


def resolve_meshes(
    cfg: Config, meshes: dict[str, ParallelConfig], available: int, *, given: bool
) -> tuple[dict[str, Config], dict[str, str]]:
    """Resolve the config of each mesh.

    Args:     given: the meshes come from the command line rather than from the defaults.
    Returns:  the configs, and of default meshes that cannot run, why; each by name.
    Raises:   ConfigError for a given mesh that cannot run, for an error that all default meshes
              have in common, and if none is left.
    """
    configs: dict[str, Config] = {}
    left_out: dict[str, str] = {}
    for name, parallel in meshes.items():
        needed = num_devices(parallel)
        try:
            if needed > available:
                rule = f"needs {needed} devices, but there are {available}"
                raise ConfigError(
                    "--mesh", name, rule, f"simulate them with --run.cpu-devices {needed}"
                )
            on_mesh = resolve(dataclasses.replace(cfg, parallel=parallel), needed)
            _require_same_loss(name, on_mesh)
            configs[name] = on_mesh
        except ConfigError as error:
            if given:
                raise
            left_out[name], common = str(error), error
    if not configs and len(set(left_out.values())) == 1:
        raise common  # an error of the config, not of the mesh
    if not configs:
        raise ConfigError("--mesh", None, "no default mesh fits this config", "leave out --full")
    return configs, left_out


def _require_same_loss(name: str, cfg: Config) -> None:
    """Raise ConfigError if the loss depends on the number of microbatches."""
    t, microbatches = cfg.train, cfg.parallel.num_microbatches
    if t.balance_loss and t.balance_over == "batch" and microbatches > 1:
        rule = f"has {microbatches} microbatches, over each of which train.balance_over balances"
        raise ConfigError("--mesh", name, rule, "use --train.balance-over sequence")
