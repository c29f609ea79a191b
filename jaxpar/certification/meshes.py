"""Parses and resolves the meshes to certify."""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.certification import small_config
from jaxpar.components.experts import experts_in
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


def without_mesh(cfg: Config) -> Config:
    """Return a config for one device: without a mesh, and without what needs replicas."""
    one = parse_meshes(["data=1"], cfg.parallel)["data=1"]
    one = dataclasses.replace(one, replica_reduction="float32")
    return dataclasses.replace(cfg, parallel=one, diloco=None)


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


# ------------------------------------------------------------------- the meshes without --mesh

#: The most devices of a mesh without --mesh.
MOST_DEVICES = 16

#: The meshes without --mesh. An axis of 4 shows what one of 2 hides: with two devices, the next one
#: is the one before. Each option is in one at least, and accumulation in both loops over layers.
OF_ALL = (
    "data=2,tensor=4,zero=2,num_microbatches=2,layer_loop=unroll,row_groups=2",
    "sequence=4,context=ring,num_microbatches=2,layer_loop=scan",
    "pipeline=4,num_microbatches=8,tensor=2,schedule=zero_bubble,zero=1,layer_loop=unroll",
    "pipeline=2,virtual_stages=4,num_microbatches=4,loss_chunks=2,zero=1",
    "sequence=4,tensor=2,context=ulysses",
    "replica=2,data=2,sequence=2",
    "tensor=4,num_microbatches=2,layer_loop=scan",
    "data=2,tensor=2,zero=1,num_microbatches=2,layer_loop=unroll",
)

#: One with stages of unequal numbers of layers, of as many periods as the others' models have.
UNEQUAL = "pipeline=2,num_microbatches=4,layers_per_stage={},schedule=gpipe"

#: Those of a model with experts. With a slack of 0.3, most rows go through further rounds.
OF_EXPERTS = (
    "expert=4,data=2,expert_dispatch=rows,expert_slack=0.3",
    "expert=4,tensor=2,expert_dispatch=tokens,expert_slack=0.3,num_microbatches=2",
    "expert=2,tensor=2,expert_tensor=1,layer_loop=unroll,row_groups=2",
    "expert=2,sequence=4,context=ulysses",
    "expert=2,pipeline=2,virtual_stages=2,num_microbatches=4",
    "expert=2,replica=2,tensor=2,num_microbatches=2,layer_loop=scan",
    "expert=2,pipeline=2,num_microbatches=4,tensor=2,schedule=zero_bubble,zero=1,layer_loop=unroll",
)

#: What to try in place of an option of a mesh that a config refuses, in this order. "": without it.
SIMPLER: tuple[tuple[str, str], ...] = (
    ("context", ""),
    ("row_groups", ""),
    ("virtual_stages", "2"),
    ("virtual_stages", ""),
    ("schedule", ""),
    ("expert_tensor", ""),
    ("zero", ""),
    ("layer_loop", ""),
    ("expert_slack", ""),
    ("expert_dispatch", ""),
    ("loss_chunks", ""),
    ("num_microbatches", ""),
    *((axis, str(size)) for size in (2, 1) for axis in AXES),
)


def own_mesh(p: ParallelConfig) -> str:
    """Return the mesh of a config as text, with axes of at most 2 and at most MOST_DEVICES."""
    sizes = {axis: 1 if getattr(p, axis) == 1 else 2 for axis in AXES}
    for axis in ("replica", "data", "sequence"):
        if math.prod(sizes.values()) > MOST_DEVICES:
            sizes[axis] = 1
    found = {axis: size for axis, size in sizes.items() if size > 1}
    if p.virtual_stages > 1:
        found["virtual_stages"] = 2
    if p.num_microbatches > 1 or p.pipeline > 1:
        found["num_microbatches"] = 4 if p.pipeline > 1 else 2
    if p.row_groups > 1:
        found["row_groups"] = 2
    return _text({name: str(n) for name, n in found.items()})


def default_meshes(cfg: Config, available: int) -> tuple[dict[str, ParallelConfig], dict[str, str]]:
    """Return the meshes without --mesh, that of the config first.

    A mesh that the config refuses, or that has more than the available devices, is replaced by the
    nearest form that can be.

    Args:     cfg: not yet shrunk.
    Returns:  the meshes by name; and by name, why others are not among them.
    """
    p = dataclasses.replace(cfg.parallel, num_microbatches=1, row_groups=1)
    lists = OF_EXPERTS if experts_in(cfg.model) else OF_ALL
    found: dict[str, ParallelConfig] = {}
    left_out: dict[str, str] = {}
    for wanted in (own_mesh(cfg.parallel), *lists):
        name, why = _nearest(cfg, wanted, p, available)
        if name and name not in found:
            found |= parse_meshes([name], p)
        if name != wanted:
            left_out[wanted] = f"{why} Run instead: {name}" if name else why
    if lists is OF_ALL:
        n = len(small_config.pattern(cfg.model))
        periods = len(small_config.shrink(cfg, list(found.values())).model.layers) // n
        last = max(periods // 4, 1) * n
        wanted = UNEQUAL.format(f"{periods * n - last},{last}")
        if why := _refused(cfg, wanted, p, available):
            left_out[wanted] = why
        else:
            found |= parse_meshes([wanted], p)
    return found, left_out


def _nearest(cfg: Config, wanted: str, p: ParallelConfig, available: int) -> tuple[str, str]:
    """Return the nearest form of a mesh that a config can have, "" if none, and why it changed."""
    first = _refused(cfg, wanted, p, available)
    if not first:
        return wanted, ""
    for one in simpler(wanted):
        if not _refused(cfg, one, p, available):
            return one, first
    form = wanted
    for option in SIMPLER:
        form = _without(form, *option)
        if not _refused(cfg, form, p, available):
            return form, first
    return "", first


def simpler(mesh: str) -> Iterator[str]:
    """Yield a mesh with one option simpler, for each of SIMPLER that it has."""
    found = (_without(mesh, *option) for option in SIMPLER)
    yield from dict.fromkeys(one for one in found if one != mesh)


def _without(mesh: str, option: str, value: str) -> str:
    """Return a mesh with `value` in place of an option's larger one, or without it for ""."""
    items = dict(item.split("=", 1) for item in mesh.split(",") if "=" in item)
    if option not in items or (value and int(items[option]) <= int(value)):
        return mesh
    items[option] = value
    return _text({name: n for name, n in items.items() if n and not (name in AXES and n == "1")})


def _text(items: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in items.items()) or "data=1"


def _refused(cfg: Config, name: str, p: ParallelConfig, available: int) -> str:
    """Return why a shrunk config cannot have a mesh; "" if it can."""
    try:
        mesh = parse_meshes([name], p)[name]
        if (needed := num_devices(mesh)) > available:
            return f"needs {needed} devices, but there are {available}."
        stages, period = mesh.pipeline * mesh.virtual_stages, len(small_config.pattern(cfg.model))
        most = MOST_LAYERS // 2 if experts_in(cfg.model) else MOST_LAYERS
        if stages > 2 and stages * period > most:
            return f"needs {stages * period} layers, which take long to compile."
        on_mesh = dataclasses.replace(small_config.shrink(cfg, [mesh]), parallel=mesh)
        _require_same_loss(name, resolve(on_mesh, needed, explain=False))
    except ConfigError as error:
        return str(error)
    return ""


#: The most layers that stages may need, and half as many with experts, which take twice as long.
MOST_LAYERS = 8
