"""Rules about the layers of a model, on a mesh."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, cast

from jaxpar.components.component import Term
from jaxpar.components.dims import Dim, DimRule, dims_of, numbers
from jaxpar.components.experts import Experts
from jaxpar.components.model import Model, repetition
from jaxpar.components.recurrent import GatedDeltaNet, Recurrent
from jaxpar.components.weight import RULES
from jaxpar.config import Config, ConfigError, ParallelConfig, default_of, flag, require
from jaxpar.config.fields import refused
from jaxpar.config.layers import addressed
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.config.rules.divisibility import FLOAT8

#: What the Triton kernels of recurrences compute: tokens of a chunk, widths of keys and values.
KEYS, CHUNKS, VALUES = (64, 128), (32, 64), 64


def of_components(cfg: Config) -> list[ConfigError]:
    """Return an error for each broken rule of the model's components, and of those about
    the mesh, of which one wrong size breaks many, the first."""
    # `parallel.data` counts once it is known.
    p = dataclasses.replace(cfg.parallel, data=max(cfg.parallel.data, 1))
    found = []
    for rule in _broken(cfg.model, p):
        path = _path(rule.field)
        ways = (flag(_path(one), value) for one, value in rule.fixes)
        found.append(refused(path, _value(cfg, path), rule.rule, *ways))
    return found


@functools.lru_cache(maxsize=128)
def _broken(m: Model, parallel: ParallelConfig) -> tuple[DimRule, ...]:
    broken = [rule for rule in m.rules(parallel) if not rule.ok]
    of_mesh = [rule for rule in broken if "parallel." in rule.rule]
    return tuple(rule for rule in broken if rule not in of_mesh[1:])


def _path(field: str) -> str:
    return field if field.startswith("parallel.") else f"model.{field}"


def _value(cfg: Config, path: str) -> Any:
    found = list(addressed(cfg.model.layers, path.split(".")[1:]))
    return found[0][1] if found else getattr(cfg.model, path.rpartition(".")[2], "")


def float8_of_components(cfg: Config) -> list[ConfigError]:
    """Return an error for each matrix that cuBLAS cannot multiply in float8, but for its dim
    d_model, which is in the table of `divisibility.py`."""
    if cfg.compute.matmul_dtype != "float8":
        return []
    model, found = cfg.model, dict[str, ConfigError]()
    plain = flag("compute.matmul_dtype", "compute")
    for layer in model.distinct:
        for role in ("mixer", "feed_forward"):
            term = getattr(layer, role)
            for dim, size, unit in _float8_dims(term, model, cfg) if term else ():
                field = dim.fields[0] if dim.fields else dim.weight
                path = f"model.{layer.name}.{role}.{field}"
                value = dict(numbers(term)).get(field, size)
                rule = f"makes {size} of {dim.weight} on a device, which must be divisible by "
                fixes = [flag(path, -(-value // unit) * unit)] if dim.fields else []
                error = refused(path, value, f"{rule}{FLOAT8} for float8 matmuls", *fixes, plain)
                found.setdefault(path, error)
    return list(found.values())


def _float8_dims(term: Term, model: Model, cfg: Config) -> Iterator[tuple[Dim, int, int]]:
    """Yield the dims of matrices that are not multiples of FLOAT8: one that a field makes, the size
    on a device, and what the field must be a multiple of."""
    is_spread, tensor = spreads_experts(cfg.parallel), cfg.parallel.tensor
    dims = {name: list(of) for name, of in groupby(dims_of(term, model, is_spread=is_spread), _of)}
    columns: dict[str, list[Dim]] = {}
    for name, weight in term.declared(model).items():
        if not (weight.is_matrix and weight.float8):
            continue
        n = len(weight.shape) - weight.columns
        for part, key in ((dims[name][:n], ""), (dims[name][n:], weight.into)):
            part = [dim for dim in part if dim.axis not in _NOT_MULTIPLIED]
            if not part:
                continue
            size = math.prod(dim.size for dim in part)
            ways = tensor if any(RULES[dim.axis] == ("tensor",) for dim in part) else 1
            if key:  # concatenated
                columns.setdefault(key, []).append(part[0]._replace(size=size // ways))
            elif size // ways % FLOAT8:
                yield part[0], size // ways, _unit(part[0], size // ways, ways, term)
    for parts in columns.values():
        if (size := sum(dim.size for dim in parts)) % FLOAT8:
            by_field = next((dim for dim in parts if dim.fields), parts[0])
            yield by_field, size, _unit(by_field, size, tensor, term)


def _of(dim: Dim) -> str:
    return dim.weight


def _unit(dim: Dim, size: int, ways: int, term: Term) -> int:
    """Return what a field must be a multiple of. Args:     size: on each of `ways` devices."""
    value = dict(numbers(term)).get(dim.fields[0], 1) if dim.fields else 1
    each = size * ways // value if size * ways % value == 0 else 1
    return FLOAT8 // math.gcd(FLOAT8, each) * ways


#: Logical axes of dims that have their own rules, or that are no dims of a product.
_NOT_MULTIPLIED = ("embed", "expert_embed", "experts", "spread_experts")


def recurrences(cfg: Config) -> list[ConfigError]:
    """Return an error for each recurrence that shards of a sequence, or the
    kernels that the config asks for, cannot compute."""
    found, backend = [], "compute.recurrent_backend"
    auto, shard = flag(backend, "auto"), cfg.data.seq_len // cfg.parallel.sequence
    of = [one for one in dict.fromkeys(cfg.model.layers) if isinstance(one.mixer, Recurrent)]
    if not of and cfg.compute.recurrent_backend != default_of(backend):
        rule = "needs a recurrent layer, and there is none"
        found.append(refused(backend, cfg.compute.recurrent_backend, rule, auto))
    for layer in of:
        mixer = cast(Recurrent, layer.mixer)
        where = f"model.{layer.name}.mixer"
        path, size = f"{where}.conv_kernel_size", mixer.conv_kernel_size
        rule = f"must be at most {shard + 1}: a shard of a sequence sends its last tokens to the "
        if size - 1 > shard:
            fix = flag("data.seq_len", 64 * cfg.parallel.sequence)
            found.append(refused(path, size, f"{rule}next", fix))
        if cfg.compute.recurrent_backend != "triton" or not mixer.has_kernels:
            continue
        _, keys, values = mixer.state
        names = ("state_size", "head_dim")
        if isinstance(mixer, GatedDeltaNet):
            names = ("key_head_dim", "value_head_dim")
        for (name, value), sizes in zip(
            {"chunk": mixer.chunk, names[0]: keys, names[1]: values}.items(),
            (CHUNKS, KEYS, (-(-values // VALUES) * VALUES,)),
            strict=True,
        ):
            words = f"a multiple of {VALUES}" if name == names[1] else " or ".join(map(str, sizes))
            path, rule = f"{where}.{name}", f"must be {words} for {backend} = triton"
            if value not in sizes:
                found.append(refused(path, value, rule, flag(path, sizes[-1]), auto))
    return found


def before_stages(cfg: Config) -> None:
    """Check the layers that run before the stages, which all execute the same layers."""
    m, path = cfg.model, "parallel.pipeline"
    if cfg.parallel.pipeline == 1:
        return
    leading, one = m.layers[: repetition(m.layers).start], flag(path, 1)
    if not leading:
        return
    said = f"has {len(leading)} layers before those that repeat, which run before the first stage"
    for layer in dict.fromkeys(leading):
        rule = f"{said}: {layer.name} is also the name of later ones"
        require(layer.name in m.leading_stacks, cfg, path, rule, one)
        rule = f"{said}: {layer.name} has experts, which only stages have"
        require(not isinstance(layer.feed_forward, Experts), cfg, path, rule, one)
