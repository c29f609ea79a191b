"""Layers from the keys of a config.json, and the one value of a key from a model's layers.

An address names a field of a component by its class: "Attention.num_heads", "Experts.expert.d_ff",
"Layer.norms", "Norm.eps". A name without a dot is a field of `Model` that is of neither.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer
from jaxpar.components.experts import Router
from jaxpar.components.feed_forward import Glu
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer, Model, Norm
from jaxpar.components.recurrent import Recurrent
from jaxpar.config.layers import OURS

type Fields = dict[str, Any]

#: Stands for the value of an address that no layer of a model has.
ABSENT = object()

#: The classes of components in components, unless a family has another.
_INNER: dict[str, type] = {"expert": Glu, "router": Router}


class CannotSay(Exception):
    """A model that a family has no keys for, with the reason."""


@dataclass
class Draft:
    """A layer of which the keys of a config.json are read one after the other."""

    mixer: type[Mixer] | None
    feed_forward: type[FeedForward] | None
    name: str = "layers"
    own: Fields = field(default_factory=dict)
    """Fields of its mixer that are not those of all mixers of the class."""

    @property
    def attends(self) -> bool:
        """Whether it has softmax attention."""
        return self.mixer in (Attention, LatentAttention)


# ------------------------------------------------------------------------------------- reading


def build(drafts: Sequence[Draft], shared: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Make layers.

    Args:     shared: values by address, for all layers with a component of the class.
    """
    return _named([_layer(draft, shared) for draft in drafts])


def norm_of(shared: Mapping[str, Any]) -> Norm:
    """Make the norm of the residual stream."""
    norm: Norm = _make(Norm, "Norm", shared, {})
    return norm


def _layer(draft: Draft, shared: Mapping[str, Any]) -> Layer:
    mixer, forward = (
        None if cls is None else _make(cls, cls.__name__, shared, own)
        for cls, own in ((draft.mixer, draft.own), (draft.feed_forward, {}))
    )
    fields = {a.removeprefix("Layer."): v for a, v in shared.items() if a.startswith("Layer.")}
    norms = fields.pop("norms", "before")
    if isinstance(norms, Mapping):  # by class of the mixer
        norms = norms.get(draft.mixer and draft.mixer.__name__, "before")
    return Layer(draft.name, mixer, forward, norms=norms, **fields)


def _make(cls: Any, prefix: str, shared: Mapping[str, Any], own: Fields) -> Any:
    found: Fields = {}
    for name in (f.name for f in dataclasses.fields(cls)):
        address = f"{prefix}.{name}"
        given = shared.get(address, ABSENT)
        if isinstance(given, type) or any(a.startswith(f"{address}.") for a in shared):
            inner = given if isinstance(given, type) else _INNER[name]
            found[name] = _make(inner, address, shared, {})
        elif given is not ABSENT:
            found[name] = given
    return cls(**(found | own))


def _named(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Give layers that differ names of their own: after the one of layers with less attention."""
    names: dict[Layer, str] = {}
    for base in dict.fromkeys(layer.name for layer in layers):
        variants = [layer for layer in dict.fromkeys(layers) if layer.name == base]
        has = lambda what, of=variants: any(what(layer.mixer) for layer in of)  # noqa: E731
        local = lambda m: getattr(m, "is_local", False)  # noqa: E731
        rotates = lambda m: getattr(m, "rope", None) is not None  # noqa: E731
        tags = {
            layer: ["global"] * (has(local) and not local(layer.mixer))
            + ["nope"] * (has(rotates) and not rotates(layer.mixer))
            for layer in variants
        }
        firsts = {tuple(tag[:1]) for tag in tags.values()}
        whole = len(firsts) < len(variants)
        for layer, tag in tags.items():
            names[layer] = "_".join([*(tag if whole else tag[:1]), base])
    return tuple(dataclasses.replace(layer, name=names[layer]) for layer in layers)


def hint_of(address: str) -> tuple[Any, Any]:
    """Return the declared type of a field at an address, and its default or MISSING."""
    if address == "num_layers":
        return int, dataclasses.MISSING
    first, *path = address.split(".")
    cls: Any = (OURS | {"Layer": Layer, "Norm": Norm})[first] if path else Model
    for name in path or [first]:
        hint = _hints(cls)[name]
        default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
        options = (hint, *typing.get_args(hint))
        cls = next((one for one in options if dataclasses.is_dataclass(one)), None)
    return hint, default


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


# ------------------------------------------------------------------------------------- writing


class Composition:
    """The layers of a model, for what writes a config.json."""

    def __init__(self, model: Model):
        self.model = model

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, in order."""
        return self.model.layers

    @property
    def mixers(self) -> list[Any]:
        """The mixer of each layer."""
        return [layer.mixer for layer in self.layers]

    @property
    def attention(self) -> list[Any]:
        """The softmax attention of each layer that has some."""
        return [a for a in self.mixers if isinstance(a, Attention | LatentAttention)]

    def one(self, address: str) -> Any:
        """Return the value of all layers that have an address, or ABSENT.

        Raises:   CannotSay if they differ.
        """
        if "." not in address:
            return len(self.layers) if address == "num_layers" else getattr(self.model, address)
        cls, path = address.split(".", 1)
        if cls == "Norm":
            return getattr(self.model.norm, path)
        found: dict[Any, str] = {}
        for layer in dict.fromkeys(self.layers):
            for role, node in _terms(layer):
                if type(node).__name__ != cls:
                    continue
                for name in path.split("."):
                    node = getattr(node, name, ABSENT)
                if node is not ABSENT:
                    found.setdefault(node, f"model.{layer.name}.{role}{path}")
        if len(found) > 1:
            both = " and ".join(f"{place} = {value}" for value, place in [*found.items()][:2])
            raise CannotSay(f"{both}, but its models have one value")
        return next(iter(found), ABSENT)


def same[T](values: Sequence[T], what: str) -> T | None:
    """Return the one value of several, None for none. Raises:   CannotSay if they differ."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise CannotSay(f"{what} of layers: {distinct[0]} and {distinct[1]}; its models have one")
    return distinct[0] if distinct else None


def _terms(layer: Layer) -> Iterator[tuple[str, Any]]:
    yield "", layer
    yield "mixer.", layer.mixer
    yield "feed_forward.", layer.feed_forward


def canonical(m: Model) -> Model:
    """Return what a config.json says of a model: without names of layers, and what only training
    or the computation reads."""

    def of_mixer(mixer: Any) -> Any:
        if isinstance(mixer, Recurrent):
            return dataclasses.replace(mixer, chunk=Recurrent.chunk)
        if isinstance(mixer, Attention) and mixer.scale_dim == mixer.head_dim:
            return dataclasses.replace(mixer, scale_dim=None)
        return mixer

    layers = (dataclasses.replace(x, name="", mixer=of_mixer(x.mixer)) for x in m.layers)
    return dataclasses.replace(m, layers=tuple(layers), init_std=Model.init_std)


class Difference(NamedTuple):
    """A field in which two models differ."""

    path: str
    """Its address in the first."""
    value: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.path} = {self.value}, but its models have {self.other}"


def differences(m: Model, other: Model) -> Iterator[Difference]:
    """Yield where a model differs from another, whatever their layers' names are."""
    one, two = canonical(m), canonical(other)
    bare = [dataclasses.replace(x, layers=()) for x in (one, two)]
    yield from _between(bare[0], bare[1], "model")
    if len(one.layers) != len(two.layers):
        yield Difference("model.num_layers", len(one.layers), len(two.layers))
        return
    names = (layer.name for layer in m.layers)
    for name, a, b in dict.fromkeys(zip(names, one.layers, two.layers, strict=True)):
        yield from _between(a, b, f"model.{name}")


def difference(m: Model, other: Model) -> Difference | None:
    """Return where a model differs first from another; None if nowhere."""
    return next(differences(m, other), None)


def _between(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if a == b:
        return
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        for name in (f.name for f in dataclasses.fields(a)):
            yield from _between(getattr(a, name), getattr(b, name), f"{path}.{name}")
    else:
        yield Difference(path, _shown(a), _shown(b))


def _shown(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return value
