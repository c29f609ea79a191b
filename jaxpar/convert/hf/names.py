"""The names of tensors in a format, from which the layout follows by what the weights declare.

A linear layer is stored as [out, in], the transpose of a weight's inputs and outputs. Everything
else is stored as declared, with its dimensions merged. A `StoredAs` says what differs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxpar.components.experts import Experts
from jaxpar.components.model import Layer
from jaxpar.components.weight import Weight
from jaxpar.config import Model
from jaxpar.convert.hf.tensor_layout import Entry
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import flat

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class StoredAs:
    """Where a weight is stored, if it is not alone in a tensor of the usual layout."""

    name: str
    theirs: str = ""
    """As `Entry.theirs`. The weight's dimensions are a, b, c, ..."""
    together: tuple[str, ...] = ()
    """All weights in the tensor, in order."""


type Name = str | StoredAs


def together(name: str, theirs: str, *weights: str) -> dict[str, StoredAs]:
    """Return where weights are that share a tensor."""
    return {weight: StoredAs(name, theirs, weights) for weight in weights}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of all tensors that a format may have."""

    top: Mapping[str, str]
    """Of the arrays outside the layers."""
    layer: str = "model.layers.{L}."
    """What the names of a layer's tensors begin with; {L} is the index in the model."""
    weights: Mapping[str, Name]
    """By name of the weight, after `layer`."""
    experts: Mapping[str, Name] = field(default_factory=dict)
    """Those of layers with experts that are not as in `weights`; {E} is the expert."""
    modules: Mapping[str, Name] = field(default_factory=dict)
    """What modules for multi-token prediction have beside their layer, after `layer`."""

    @property
    def of_each_expert(self) -> dict[str, str]:
        """The names of weights that each expert has in tensors of its own."""
        return {
            weight: n for weight, n in self.experts.items() if isinstance(n, str) and "{E}" in n
        }

    def of_layer(self, layer: Layer) -> Mapping[str, Name]:
        """Return the names of the weights of a layer."""
        has_experts = isinstance(layer.feed_forward, Experts)
        return {**self.weights, **self.experts} if has_experts else self.weights


#: The layout of arrays outside the layers, and of the projection of a module.
_TOP = {"embed": "a b", "positions": "a b", "head": "b a"}
_JOIN = "c ab"


def entries_of(names: Names, m: Model) -> list[Entry]:
    """Return where each parameter of a model is. Those without a name are left out."""
    specs, found = flat(param_specs(m)), []
    for path, name in names.top.items():
        if path in specs:
            found.append(_entry(path, name, specs[path].shape, _TOP.get(path, "a")))
    for path, layer, places in _stacks(m):
        of, weights = names.of_layer(layer), layer.weights(m)
        held = {name: where for name, where in of.items() if name in weights}
        held = held if path != "mtp" or names.modules else {}
        for name, where in held.items():
            found.append(_of_layer(f"{path}/{name}", where, weights, names.layer, places))
    first = m.num_layers
    of_modules = tuple(range(first, first + m.mtp_depth))
    for name, where in names.modules.items() if m.mtp_depth else ():
        shape = specs[f"mtp/{name}"].shape[1:]
        theirs = _JOIN if len(shape) > 1 else "a"
        full = names.layer + str(where)
        found.append(_entry(f"mtp/{name}", full, shape, theirs, layers=of_modules))
    return found


def unnamed(names: Names, m: Model) -> list[str]:
    """Return the paths of the parameters that have no name in a format."""
    return sorted(flat(param_specs(m)).keys() - {entry.path for entry in entries_of(names, m)})


def _stacks(m: Model) -> Iterator[tuple[str, Layer, tuple[int, ...]]]:
    """Yield the layers of each name, and of modules: one of them, and the places of all."""
    for stack, layers in m.stacks.items():
        yield stack, layers[0], m.places_of(stack)
    if m.mtp_depth:
        first = m.num_layers
        yield "mtp", m.module_layer, tuple(range(first, first + m.mtp_depth))


def _of_layer(
    path: str, where: Name, weights: Mapping[str, Weight], prefix: str, places: tuple[int, ...]
) -> Entry:
    name = path.rpartition("/")[2]
    where = where if isinstance(where, StoredAs) else StoredAs(where)
    weight, by_expert = weights[name], "{E}" in where.name
    letters = ("E" if by_expert else "") + LETTERS[by_expert : len(weight.shape)]
    theirs = where.theirs or _usual(weight, letters[by_expert:])
    widths: tuple[int, ...] = ()
    if "+" in theirs:
        widths = tuple(
            math.prod(n for a, n in zip(LETTERS, weights[other].shape, strict=False)
                      if a not in theirs)
            for other in where.together
        )  # fmt: skip
    return _entry(
        path,
        prefix + where.name,
        weight.shape,
        theirs,
        letters=letters,
        layers=places,
        part=where.together.index(name) if where.together else 0,
        widths=widths,
        columns=weight.columns,
    )


def _entry(
    path: str,
    name: str,
    shape: tuple[int, ...],
    theirs: str,
    *,
    letters: str = "",
    layers: tuple[int, ...] = (),
    part: int = 0,
    widths: tuple[int, ...] = (),
    columns: int = 0,
) -> Entry:
    letters = letters or LETTERS[: len(shape)]
    sizes = dict(zip(letters, shape, strict=True)) | ({"L": len(layers)} if layers else {})
    return Entry(
        path,
        name,
        ("L" if layers else "") + letters,
        theirs,
        sizes,
        layers=layers,
        part=part,
        widths=widths,
        columns=columns,
    )


def _usual(weight: Weight, letters: str) -> str:
    """Return how a weight is stored, but for the index of an expert."""
    columns = weight.columns
    if weight.axes[:1] == ("embed",) and len(letters) == 2:
        columns = 1  # a router
    if columns:
        return f"{letters[-columns:]} {letters[:-columns]}"
    is_kernel = len(letters) == 3 and weight.rank == 2
    return f"{letters[:-1]} 1 {letters[-1]}" if is_kernel else letters or "1"
