"""Which fields of a component make the dims of its weights: what its sizes have to divide by.

A field makes the dims that grow when it is doubled. So nothing beside `weights` has to be declared
for a component to be checked against a mesh, and to be made small for `certify`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.components.weight import RULES, Weight, spread

if TYPE_CHECKING:
    from jaxpar.components.component import Term
    from jaxpar.components.model import Model


class Dim(NamedTuple):
    """A dimension of a weight."""

    weight: str
    axis: str
    """Its logical axis."""
    size: int
    fields: tuple[str, ...]
    """Fields that it grows with, with dots: "expert.d_ff". "d_model" is that of the model."""


class DimRule(NamedTuple):
    """A condition of a component's fields, on a mesh."""

    field: str
    """Name of a field, with dots; or of a weight, whose dim no field makes."""
    ok: bool
    rule: str
    """The condition, in words: "must be divisible by ..."."""
    fixes: tuple[tuple[str, Any], ...] = ()
    """Alternatives: values for this field, or for another one, of `parallel` too."""

    def below(self, address: str) -> "DimRule":
        """Return the rule with the address of what has its fields before their names."""
        whole = lambda field: field if field.startswith("parallel.") else f"{address}.{field}"  # noqa: E731
        fixes = tuple((whole(field), value) for field, value in self.fixes)
        return self._replace(field=whole(self.field), fixes=fixes)


class SmallSizes(NamedTuple):
    """What a small model has, and what all its meshes divide."""

    model: "Model"
    """The original model."""
    d_model: int
    """Width of the small one."""
    shorter: float
    """Tokens of a sequence, relative to the original's."""
    ways: Mapping[str, int]
    """What dims of each logical axis must be divisible by."""

    @classmethod
    def of(cls, model: "Model", d_model: int, shorter: float, meshes: list[Any]) -> "SmallSizes":
        """Return sizes that each of some meshes divides.

        Args:     meshes: sections `parallel` of configs.
        """
        ways = {axis: math.lcm(*(ways_of(axis, p) for p in meshes)) for axis in RULES}
        spreads = [ways_of("spread_experts", p) for p in meshes if _spreads(p)]
        ways["experts"] = math.lcm(ways["experts"], *spreads)
        by_heads = [p.tensor * p.sequence for p in meshes if p.context == "ulysses"]
        ways["heads"] = math.lcm(ways["heads"], *by_heads)
        return cls(model, d_model, shorter, ways)

    @property
    def narrower(self) -> float:
        """Width relative to the original's."""
        return self.d_model / self.model.d_model

    def width(self, size: int, unit: int = 2) -> int:
        """Return a width in proportion to `d_model`: a multiple of a unit, of at least 4."""
        least = min(size, 4)
        return max(round(size * self.narrower / unit), -(-least // unit)) * unit

    def length(self, tokens: int, least: int = 1) -> int:
        """Return a number of tokens in proportion to the sequence."""
        return max(round(tokens * self.shorter), min(tokens, least))


def ways_of(axis: str, parallel: Any) -> int:
    """Return over how many devices a dim of a logical axis is split."""
    return math.prod(max(getattr(parallel, name), 1) for name in RULES[axis])


def _spreads(parallel: Any) -> bool:
    """As `spreads_experts` of the config: whether tensor ranks have different experts."""
    return parallel.expert_tensor == 1 and parallel.tensor > 1


@functools.lru_cache(1024)  # a plan asks for the same dims on thousands of meshes
def dims_of(term: "Term", model: "Model", *, is_spread: bool = False) -> tuple[Dim, ...]:
    """Return the dims of a component's weights.

    Args:     is_spread: whether whole experts are spread over tensor ranks.
    """
    shapes = {name: w.shape for name, w in term.weights(model).items()}
    grown = {path: with_field(term, path, 2 * n).weights(model) for path, n in numbers(term)}
    wider = dataclasses.replace(model, d_model=2 * model.d_model)
    grown["d_model"] = term.weights(wider)
    found = []
    for name, weight in term.weights(model).items():
        axes = (spread(weight) if is_spread else weight).axes
        for i, (size, axis) in enumerate(zip(shapes[name], axes, strict=True)):
            fields = [path for path, of in grown.items() if _grows(of.get(name), i, size)]
            found.append(Dim(name, axis, size, tuple(fields)))
    return tuple(found)


def _grows(weight: Weight | None, dim: int, size: int) -> bool:
    return weight is not None and dim < len(weight.shape) and weight.shape[dim] > size


def numbers(term: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers above 0 among a component's fields, and those of components in it."""
    for field in dataclasses.fields(term):
        value = getattr(term, field.name)
        if type(value) is int and value > 0:
            yield field.name, value
        elif dataclasses.is_dataclass(value):
            yield from ((f"{field.name}.{path}", n) for path, n in numbers(value))


def with_field[T](term: T, path: str, value: Any) -> T:
    """Return a component with another value of a field, or of one of a component in it."""
    name, _, rest = path.partition(".")
    value = with_field(getattr(term, name), rest, value) if rest else value
    return dataclasses.replace(term, **{name: value})  # type: ignore[type-var]


def divisions(term: "Term", model: "Model", parallel: Any) -> Iterator[DimRule]:
    """Yield a rule for each field that makes dims which mesh axes split.

    Dims of the model's width are the model's own: `Model.rules`.
    """
    values, seen = dict(numbers(term)), set[tuple[str, str]]()
    for dim in dims_of(term, model, is_spread=_spreads(parallel)):
        for field in dim.fields or (dim.weight,):
            if field == "d_model" or (field, dim.axis) in seen or ways_of(dim.axis, parallel) == 1:
                continue
            seen.add((field, dim.axis))
            yield division(field, values.get(field, dim.size), dim.size, dim.axis, parallel)


def division(field: str, value: int, size: int, axis: str, parallel: Any) -> DimRule:
    """Return the rule that devices get equal shares of a dim.

    Args:     value: of the field. size: of the dim, which is a multiple of it, or grows with it.
    """
    ways = ways_of(axis, parallel)
    over = [name for name in RULES[axis] if getattr(parallel, name) > 1]
    product = " * ".join(f"parallel.{name}" for name in over)
    unit = ways // math.gcd(ways, size // value) if size % value == 0 else ways
    fixes = [(field, -(-value // unit) * unit)]
    if len(over) == 1:
        fits = max(n for n in range(1, ways + 1) if size % n == 0)
        fixes = [(f"parallel.{over[0]}", fits), *fixes]
    rule = f"must be divisible by {product} = {ways}"
    return DimRule(field, size % ways == 0, rule, tuple(fixes))


def smaller[T: "Term"](term: T, sizes: SmallSizes) -> T:
    """Return a component with small dims, which all meshes divide.

    Numbers of heads keep their ratios. There are few experts. Other dims keep their ratio to the
    model's width. Numbers that make no dim of a weight are kept.
    """
    axes: dict[str, set[str]] = {}
    for dim in dims_of(term, sizes.model):
        for field in dim.fields:
            axes.setdefault(field, set()).add(dim.axis)
    values = {field: n for field, n in numbers(term) if field in axes}
    unit = {f: math.lcm(*(sizes.ways[axis] for axis in sorted(axes[f]))) for f in values}
    heads = {f: n for f, n in values.items() if axes[f] & {"heads", "kv_heads"}}
    common = math.gcd(*heads.values())
    # The fewest: with as many key heads as devices, Ulysses would repeat none.
    groups = math.lcm(2, *(unit[f] // math.gcd(unit[f], n // common) for f, n in heads.items()))
    for field, n in values.items():
        if field in heads:
            small = n // common * groups
        elif axes[field] & {"experts", "spread_experts"}:
            small = -(-min(n, 8) // unit[field]) * unit[field]
        else:
            small = sizes.width(n, math.lcm(2, unit[field]))
        term = with_field(term, field, small)
    return term
