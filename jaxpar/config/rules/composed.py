"""Rules about composed models, `model.layers`, on a mesh."""

import dataclasses
from typing import Any

from jaxpar.components.attention import Attention
from jaxpar.components.model import period_of
from jaxpar.config import Config, ConfigError, default_of, flag, require
from jaxpar.config.layers import BESIDE, addressed, summary
from jaxpar.config.layout.composition import model_of
from jaxpar.config.schema.model import ModelConfig


def components_divide(cfg: Config) -> None:
    """Check what the components of a composed model say of their fields on a mesh."""
    if not cfg.model.layers:
        return
    # `parallel.data` counts once it is known.
    p = dataclasses.replace(cfg.parallel, data=max(cfg.parallel.data, 1))
    for rule in model_of(cfg.model).rules(p):
        if not rule.ok:
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
    names = list(dict.fromkeys(layer.name for layer in m.layers))
    if len(names) > 1 and p.pipeline > 1:
        period = len(period_of(m.layers))
        rule = "is not supported with layers of several kinds: all stages have the same layers"
        require(p.virtual_stages == 1, cfg, "parallel.virtual_stages", rule, _one("virtual_stages"))
        path, rule = "parallel.pipeline", f"must divide the {len(m.layers) // period} periods of "
        ok = len(m.layers) % (p.pipeline * period) == 0
        rule += f"{period} layers: all stages have the same layers"
        require(ok, cfg, path, rule, flag(path, 1))
    path, rule = "parallel.row_groups", "must be 1 with parallel layers, whose branches do not wait"
    ok = p.row_groups == 1 or not any(layer.parallel for layer in m.layers)
    require(ok, cfg, path, rule, flag(path, 1))
    own = [a for a in (layer.mixer for layer in m.layers) if isinstance(a, Attention)]
    if any(type(a).heads is not Attention.heads for a in own):
        path, rule = "parallel.context", "needs softmax attention: heads of your own read all keys"
        ok = p.context != "ring" or p.sequence == 1
        require(ok, cfg, path, rule, flag(path, "allgather"))


def _one(name: str) -> str:
    return flag(f"parallel.{name}", 1)
