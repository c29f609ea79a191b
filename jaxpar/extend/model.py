"""Compose a model, and exchange a part of one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpar.components.component import Component
from jaxpar.components.model import Layer
from jaxpar.config import ConfigError, Model
from jaxpar.config.layers import addressed, with_value


def swap(model: Model, part: str, component: type[Component] | None, **fields: Any) -> Model:
    """Return a model in which another component has the place of one.

    Args:
        part: its address: "block.mixer", or "routed.feed_forward.expert"; "*.mixer" is that of
            every layer that has one.
        component: the class of the new one, which takes the fields that the old one has too. None:
            nothing has the place.
        fields: of the new one, in place of these.
    Raises:   ConfigError for an address of no component, and for fields that are missing or
              unknown.
    """
    layers, star = model.layers, "*" in part.split(".")
    found = [
        (path, old)
        for path, old in addressed(layers, part.split("."))
        if isinstance(old, Component) or (old is None and not star)
    ]
    if not found:
        near = ", ".join(_parts(layers))
        raise ConfigError("swap", part, "is no part of the model", f"use one of {near}")
    for path, old in found:
        layers = with_value(layers, path, component and _made(path, old, component, fields))
    return model.with_layers(layers)


def _made(path: str, old: Any, component: type[Component], fields: dict[str, Any]) -> Component:
    known = {field.name: field for field in dataclasses.fields(component)}
    shared = dataclasses.fields(old) if old is not None else ()
    taken = {f.name: getattr(old, f.name) for f in shared if f.name in known and f.init} | fields
    needed = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    wrong = [name for name in fields if name not in known]
    missing = [name for name in needed if name not in taken]
    if wrong or missing:
        rule = f"{component.__name__} has no field {', '.join(wrong)}"
        if missing:
            rule = f"{component.__name__} needs {', '.join(missing)}, which the old part has not"
        fix = f"give {', '.join(missing)} to swap" if missing else f"use {', '.join(known)}"
        raise ConfigError(path, type(old).__name__, rule, fix)
    return component(**taken)


def _parts(layers: Sequence[Layer]) -> list[str]:
    """Return the addresses of all components."""
    found: list[str] = []

    def walk(node: Any, path: str) -> None:
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if isinstance(value, Component):
                found.append(f"{path}.{field.name}")
                walk(value, found[-1])

    for layer in dict.fromkeys(layers):
        walk(layer, layer.name)
    return found
