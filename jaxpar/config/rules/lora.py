"""Rules about low-rank adapters and their targets."""

import difflib
from collections.abc import Sequence

from jaxpar.components.experts import experts_in
from jaxpar.components.model import Model
from jaxpar.config import Config, ConfigError, flag, require
from jaxpar.config.lists.lora_targets import least_side, targets_of

OFF = flag("lora", None)


def lora(cfg: Config) -> None:
    """Check that the targets exist and that their dimensions are at least the rank."""
    if cfg.lora is None:
        return
    rank, path = cfg.lora.rank, "lora.rank"
    model, names = cfg.model, cfg.lora.targets
    _declarations(cfg, model, names)
    _targets(cfg, model, names)
    smaller = {name: least_side(model, name) for name in names}
    least = min(smaller, key=smaller.__getitem__)
    rule = f"must be at most {smaller[least]}, the smaller dimension of {least}"
    require(rank <= smaller[least], cfg, path, rule, flag(path, min(16, smaller[least])))


def _declarations(cfg: Config, model: Model, names: Sequence[str]) -> None:
    """Check that the weights that declare one of the targets can have adapters."""
    for layer in dict.fromkeys(model.layers):
        for role in ("mixer", "feed_forward"):
            term = getattr(layer, role)
            for name, w in term.weights(model).items() if term else ():
                if w.adapter not in names:
                    continue
                path, value = f"model.{layer.name}.{role}: {name}", f"adapter {w.adapter}"
                fix = f"remove {value} from the weight, or {OFF}"
                if not term.uses_products:
                    rule = "needs a component that multiplies by linear.products, with "
                    rule += f"uses_products True: {type(term).__name__} gets plain arrays"
                    raise ConfigError(path, value, rule, fix)
                if not w.columns or w.of_experts:
                    raise ConfigError(path, value, "needs a matrix that all tokens multiply", fix)


def _targets(cfg: Config, model: Model, names: Sequence[str]) -> None:
    path, there = "lora.targets", list(targets_of(model))
    rule, rank = "needs a weight that declares an adapter, and no layer has one", "lora.rank"
    require(bool(there), cfg, rank, rule, OFF)
    near = [m for n in names for m in difflib.get_close_matches(n, there, n=1, cutoff=0.4)]
    rule = f"must be names from {', '.join(there)}"
    rule += "; experts have no adapters" if experts_in(model) else ""
    fits = flag(path, tuple(dict.fromkeys(near) or there[:1]))
    require(bool(names) and set(names) <= set(there), cfg, path, rule, fits)
    rule, once = "must name each projection once", tuple(dict.fromkeys(names))
    require(len(set(names)) == len(names), cfg, path, rule, flag(path, once))
