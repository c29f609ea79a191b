"""`model.layers`: their JSON, their checks, and the addresses of their fields.

JSON has each different layer once, with the class and the fields of each component that are not the
defaults. Classes of jaxpar are named by their name alone; others as `file.py:Class`, and reading
them back imports no code: `--code FILE` does.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpar import components
from jaxpar.components.component import Component, FeedForward, Mixer
from jaxpar.components.model import Layer, Model, Norm
from jaxpar.components.ranges import Range, Reals, declared_range
from jaxpar.config.errors import ConfigError
from jaxpar.config.names import name_of

FIELD = "model.layers"

#: Fields of `model` beside its layers.
BESIDE = tuple(field.name for field in dataclasses.fields(Model) if field.name != "layers")

#: The key of the class among the fields of a component in JSON.
CLASS = "class"

#: The components of layers that jaxpar has, by their names in JSON: those of the list, and what
#: they extend in their files.
OURS: dict[str, type[Component]] = {
    base.__name__: base
    for cls in vars(components).values()  # in the order of their files
    if isinstance(cls, type) and issubclass(cls, Component) and cls is not Norm
    for base in reversed(cls.__mro__)
    if base.__module__ == cls.__module__
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedComponent(Component):
    """A component of a run whose code is not loaded."""

    name: str
    """The name of its class."""
    fields: tuple[tuple[str, Any], ...] = ()


# ------------------------------------------------------------------------------------- as JSON


def to_values(layers: Sequence[Layer]) -> Any:
    """Return layers as JSON's types: the different ones, and the index of each in order."""
    distinct = list(dict.fromkeys(layers))
    return {"distinct": list(map(_values, distinct)), "order": [distinct.index(x) for x in layers]}


def by_address(values: Any) -> dict[str, Any]:
    """Return the fields of layers of JSON by address, and the names of the layers in order.

    Values of another form, which a file may have, are the field `model.layers`.
    """
    found: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, inner in node.items():
                walk(inner, f"{path}.{key}")
        else:
            found[path] = node

    match values:
        case {"distinct": list(layers), "order": list(order)} if all(
            isinstance(layer, dict) and "name" in layer for layer in layers
        ) and all(isinstance(i, int) and 0 <= i < len(layers) for i in order):
            for layer in layers:
                walk({k: v for k, v in layer.items() if k != "name"}, f"model.{layer['name']}")
            return found | {FIELD: [layers[i]["name"] for i in order]}
    return {FIELD: values}


def flat_values(values: Any, path: str = "") -> dict[str, Any]:
    """Flatten a config in JSON form, or a part of it: {"section.field": value}; layers by address.

    Args:     path: of the part.
    """
    if path == FIELD:
        return by_address(values)
    if not isinstance(values, dict):
        return {path: values}
    parts = ((f"{path}.{key}" if path else key, inner) for key, inner in values.items())
    return {k: v for name, inner in parts for k, v in flat_values(inner, name).items()}


def _values(node: Any, *, every: bool = False) -> Any:
    """Return a node as JSON's types. Args:     every: also the fields that have their defaults."""
    of = functools.partial(_values, every=every)
    if isinstance(node, SavedComponent):
        return {CLASS: node.name, **{name: of(value) for name, value in node.fields}}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = [(field, getattr(node, field.name)) for field in dataclasses.fields(node)]
        said = {f.name: of(v) for f, v in fields if every or v != f.default}
        return {CLASS: _class_name(node), **said} if isinstance(node, Component) else said
    return list(map(of, node)) if isinstance(node, tuple) else node


def _class_name(node: Component) -> str:
    named = OURS.get(type(node).__name__) is type(node)
    return type(node).__name__ if named else name_of(type(node))


def as_read_by(now: Sequence[Layer], saved: Sequence[Layer]) -> tuple[list[Any], list[Any]]:
    """Return layers and saved ones with every field as JSON's types, to be compared.

    Saved components whose code is not loaded get the classes of `now`, by name.
    """
    found: dict[str, type] = {}

    def walk(node: Any) -> None:
        if isinstance(node, Component):
            found[_class_name(node)] = type(node)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            for field in dataclasses.fields(node):
                walk(getattr(node, field.name))

    for layer in dict.fromkeys(now):
        walk(layer)
    then = with_classes(saved, found.get)
    return [_values(x, every=True) for x in now], [_values(x, every=True) for x in then]


def from_values(values: Any) -> tuple[Layer, ...]:
    """Read layers of JSON. Components that are not jaxpar's become a `SavedComponent`.

    Raises:   ConfigError for another form, an unknown class of jaxpar or an unknown field.
    """
    if values in ([], ()):
        return ()
    match values:
        case {"distinct": list(distinct), "order": list(order)} if all(
            isinstance(i, int) and 0 <= i < len(distinct) for i in order
        ):
            made = [_build(Layer, one, f"{FIELD}[{i}]") for i, one in enumerate(distinct)]
            return tuple(made[i] for i in order)
    rule = 'must be {"distinct": [...], "order": [...]}, with an index of distinct for each layer'
    raise ConfigError(FIELD, str(values)[:80], rule, "use the config.json that a run wrote")


def _built(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, dict) and CLASS in value:
        name, fields = value[CLASS], {n: v for n, v in value.items() if n != CLASS}
        if name in OURS:
            return _build(OURS[name], fields, path)
        if not isinstance(name, str) or ":" not in name:
            rule = f"is no component; there are {', '.join(OURS)}"
            raise ConfigError(f"{path}.{CLASS}", name, rule, "use one of them, or file.py:Class")
        inner = {n: _built(Any, v, f"{path}.{n}") for n, v in fields.items()}
        return SavedComponent(name=name, fields=tuple(inner.items()))
    if isinstance(value, dict):
        options = typing.get_args(hint) or (hint,)
        section = next((one for one in options if dataclasses.is_dataclass(one)), None)
        return tuple(value.items()) if section is None else _build(section, value, path)
    return tuple(_built(Any, one, path) for one in value) if isinstance(value, list) else value


def _build(cls: Any, values: dict[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            rule = f"is no field of {cls.__name__}, which has {', '.join(sorted(known))}"
            raise ConfigError(f"{path}.{name}", values[name], rule, "remove it")
    return cls(**{name: _built(hints[name], v, f"{path}.{name}") for name, v in values.items()})


def with_classes(layers: Sequence[Layer], find: Callable[[str], Any]) -> tuple[Layer, ...]:
    """Return layers with the components whose classes `find` returns; None for the others."""

    def loaded(node: Any) -> Any:
        if isinstance(node, SavedComponent):
            cls = find(node.name)
            if cls is None:
                return node
            return _build(cls, {name: _again(loaded(value)) for name, value in node.fields}, FIELD)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            fields = {f.name: loaded(getattr(node, f.name)) for f in dataclasses.fields(node)}
            return dataclasses.replace(node, **fields)
        return node

    return tuple(map(loaded, layers))


def with_classes_of(m: Any, other: Any) -> Any:
    """Return a model with the components whose classes another model has."""
    classes: dict[str, Any] = {}

    def note(node: Any) -> None:
        if dataclasses.is_dataclass(node):
            classes[name_of(type(node))] = type(node)
            for field in dataclasses.fields(node):
                note(getattr(node, field.name))

    for layer in dict.fromkeys(other.layers):
        note(layer)
    layers = with_classes(m.layers, classes.get)
    return m if layers == m.layers else m.with_layers(layers)


def _again(value: Any) -> Any:
    """Return the object that `_built` made a tuple of, for want of its class."""
    if not isinstance(value, tuple) or not value:
        return value
    named = all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value)
    return dict(value) if named and len(dict(value)) == len(value) else value


# ------------------------------------------------------------------------------------- checks


def check_layers(layers: Any) -> None:
    """Check the layers of a model.

    Raises:   ConfigError naming the layer: for what is no layer, for a component of which the code
              is not loaded, and for a field of another type.
    """
    fix = "use layers=[Layer(name, mixer, feed_forward), ...] in a config file"
    if not isinstance(layers, tuple) or not all(isinstance(one, Layer) for one in layers):
        raise ConfigError(FIELD, layers, "must be a sequence of jaxpar.extend.Layer", fix)
    for layer in dict.fromkeys(layers):
        path = f"model.{layer.name}"
        if not layer.name.isidentifier() or layer.name in _TAKEN:
            rule = "must be a name that is no field of the model: it addresses the layer"
            raise ConfigError(f"{FIELD}: name", layer.name, rule, 'use another, such as "block"')
        for role, kind in (("mixer", Mixer), ("feed_forward", FeedForward)):
            value = getattr(layer, role)
            if isinstance(value, SavedComponent):
                file = value.name.partition(":")[0]
                rule = "is of a class whose code is not loaded: reading a run imports none"
                raise ConfigError(f"{path}.{role}", value.name, rule, f"add --code {file}")
            if value is not None and not isinstance(value, kind):
                rule = f"must be a {kind.__name__} or None"
                raise ConfigError(f"{path}.{role}", type(value).__name__, rule, fix)
        if layer.mixer is None and layer.feed_forward is None:
            raise ConfigError(path, None, "has neither a mixer nor a feed-forward", fix)
    by_name: dict[str, Any] = {}
    for layer in layers:
        first = by_name.setdefault(layer.name, layer)
        if first is not layer and first != layer:
            rule = "is the name of layers that differ: one name, one value"
            raise ConfigError(f"{FIELD}: name", layer.name, rule, "give each its own name")


#: Names that no layer may have: fields of a model, and groups of weights that are of no layer.
_TAKEN = {*BESIDE, "num_layers", "embed", "head", "final_norm", "final_norm_bias", "mtp", "top"}


# ----------------------------------------------------------------------------------- addresses


def addressed(layers: Sequence[Layer], keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field that an address names.

    Args:     keys: of `model.block.mixer.num_heads`, those after model. A star is any one name.
    """
    for layer in dict.fromkeys(layers):
        if keys[0] in ("*", layer.name):
            yield from _found(layer, keys[1:], f"model.{layer.name}")


def _found(node: Any, keys: Sequence[str], path: str) -> Iterator[tuple[str, Any]]:
    if not keys:
        yield path, node
    elif dataclasses.is_dataclass(node):
        names = [f.name for f in dataclasses.fields(node) if f.name != "name"]
        for name in names if keys[0] == "*" else [keys[0]] * (keys[0] in names):
            inner = _section(node, name) if len(keys) > 1 else getattr(node, name)
            yield from _found(inner, keys[1:], f"{path}.{name}")


def _section(node: Any, name: str) -> Any:
    """Return a field's component; where it is None, the one that setting a field of it makes."""
    if (value := getattr(node, name)) is not None:
        return value
    options = typing.get_args(typing.get_type_hints(type(node))[name])
    made = (one for one in options if dataclasses.is_dataclass(one) and not required_fields(one))
    return next((one() for one in made if isinstance(one, type)), None)


def required_fields(section: Any) -> tuple[str, ...]:
    """Return the names of the fields of a section or a component that have no default."""
    fields = dataclasses.fields(section)
    return tuple(f.name for f in fields if f.default is f.default_factory)  # both MISSING


def type_at(layers: Sequence[Layer], path: str) -> Any:
    """Return the declared type of a field at a path without a star."""
    _, name, *keys = path.split(".")
    node: Any = next(layer for layer in layers if layer.name == name)
    for key in keys[:-1]:
        node = _section(node, key)
    return typing.get_type_hints(type(node))[keys[-1]]


def with_value(layers: Sequence[Layer], path: str, value: Any) -> tuple[Layer, ...]:
    """Return layers with another value of a field. Args:     path: without a star."""
    _, name, *keys = path.split(".")

    def put(node: Any, keys: Sequence[str]) -> Any:
        inner = value if len(keys) == 1 else put(_section(node, keys[0]), keys[1:])
        return dataclasses.replace(node, **{keys[0]: inner})

    # Once for each, so that layers with a NaN are still the same one.
    made = {id(layer): put(layer, keys) for layer in layers if layer.name == name}
    return tuple(made.get(id(layer), layer) for layer in layers)


def all_paths(layers: Sequence[Layer]) -> list[str]:
    """Return the address of every field of layers."""
    found: list[str] = []

    def walk(node: Any, path: str) -> None:
        for field in dataclasses.fields(node):
            value, inner = getattr(node, field.name), f"{path}.{field.name}"
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                walk(value, inner)
            elif field.name != "name":
                found.append(inner)

    for layer in dict.fromkeys(layers):
        walk(layer, f"model.{layer.name}")
    return found


@functools.cache
def _ranges_of(component: Any) -> dict[str, Range | Reals | None]:
    hints = typing.get_type_hints(component, include_extras=True)
    return {name: declared_range(hint) for name, hint in hints.items()}


def numbers_in_layers(layers: Sequence[Layer]) -> Iterator[tuple[str, Any, Range | Reals, Any]]:
    """Yield each number of components whose field declares a range.

    Returns:  its address, its value, the range, and the field's default or another good value.
    """

    def inside(node: Any, path: str) -> Iterator[tuple[str, Any, Range | Reals, Any]]:
        ranges = _ranges_of(type(node))  # type: ignore[arg-type]
        for field in dataclasses.fields(node):
            value, inner = getattr(node, field.name), f"{path}.{field.name}"
            allowed = ranges[field.name]
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield from inside(value, inner)
            elif allowed is not None:
                good = getattr(allowed, "good", None) or allowed.least
                default = field.default if field.default is not dataclasses.MISSING else good
                yield inner, value, allowed, default

    for layer in dict.fromkeys(layers):
        yield from inside(layer, f"model.{layer.name}")
