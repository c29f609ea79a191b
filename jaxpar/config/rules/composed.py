"""Rules about composed models, `model.layers`, on a mesh."""

import dataclasses
from typing import Any

from jaxpar.components.experts import Experts
from jaxpar.components.model import repetition
from jaxpar.config import Config, ConfigError, default_of, flag, require
from jaxpar.config.layers import BESIDE, addressed, summary
from jaxpar.config.layout.composition import model_of
from jaxpar.config.rules.divisibility import OF_MODEL
from jaxpar.config.schema.model import ModelConfig


def components_divide(cfg: Config) -> None:
    """Check what the components of a composed model say of their fields on a mesh."""
    if not cfg.model.layers:
        return
    # `parallel.data` counts once it is known.
    p = dataclasses.replace(cfg.parallel, data=max(cfg.parallel.data, 1))
    for rule in model_of(cfg.model).rules(p):
        if not rule.ok and f"model.{rule.field}" not in OF_MODEL:  # `divisibility` has those
            path = rule.field if rule.field.startswith("parallel.") else f"model.{rule.field}"
            ways = (
                flag(one if one.startswith("parallel.") else f"model.{one}", value)
                for one, value in rule.fixes
            )
            raise ConfigError(path, _value(cfg, path), rule.rule, "use " + ", or ".join(ways))


def _value(cfg: Config, path: str) -> Any:
    found = list(addressed(cfg.model.layers, path.split(".")[1:]))
    return found[0][1] if found else getattr(cfg.model, path.rpartition(".")[2], "")


def composed(cfg: Config) -> None:
    """Check that the flags of layers have their defaults, and that stages have the same layers."""
    m, p = cfg.model, cfg.parallel
    if not m.layers:
        return
    said = summary(m.layers)
    for field in dataclasses.fields(ModelConfig):
        path, value = f"model.{field.name}", getattr(m, field.name)
        if field.name not in BESIDE and value not in (default_of(path), said.get(field.name)):
            rule = "describes the layers of a model without model.layers"
            raise ConfigError(path, value, rule, f"remove {field.name}, which model.layers says")
    if p.pipeline > 1:
        _before_stages(cfg)


def _before_stages(cfg: Config) -> None:
    """Check the layers that run before the stages, which all execute the same layers."""
    m, path = cfg.model, "parallel.pipeline"
    leading, one = m.layers[: repetition(m.layers).start], flag(path, 1)
    if not leading:
        return
    said = f"has {len(leading)} layers before those that repeat, which run before the first stage"
    for layer in dict.fromkeys(leading):
        rule = f"{said}: {layer.name} is also the name of later ones"
        require(layer.name in model_of(m).leading_stacks, cfg, path, rule, one)
        rule = f"{said}: {layer.name} has experts, which only stages have"
        require(not isinstance(layer.feed_forward, Experts), cfg, path, rule, one)
