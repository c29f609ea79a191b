"""Rules about low-rank adapters and their targets."""

import difflib

from jaxpar.components.experts import experts_in
from jaxpar.components.model import Model
from jaxpar.config import Config, ConfigError, default_of, flag, require, value_of
from jaxpar.config.lists.lora_targets import least_side, targets_of


def lora(cfg: Config) -> None:
    """Check that the targets exist and that their dimensions are at least the rank."""
    rank, path = cfg.lora.rank, "lora.rank"
    if rank == 0:
        for other in ("lora.alpha", "lora.rank_stabilized", "lora.targets"):
            default = default_of(other)
            rule = f"needs adapters, but {path} is 0"
            ways = flag(path, 16), flag(other, default)
            require(value_of(cfg, other) == default, cfg, other, rule, *ways)
        return
    alpha = cfg.lora.alpha
    require(alpha > 0, cfg, "lora.alpha", "must be above 0", flag("lora.alpha", 16.0))
    model, names = cfg.model, cfg.lora.targets.split(",")
    _declarations(cfg, model, names)
    _targets(cfg, model, names)
    smaller = {name: least_side(model, name) for name in names}
    least = min(smaller, key=smaller.__getitem__)
    rule = f"must be at most {smaller[least]}, the smaller dimension of {least}"
    require(rank <= smaller[least], cfg, path, rule, flag(path, min(16, smaller[least])))


def _declarations(cfg: Config, model: Model, names: list[str]) -> None:
    """Check that the weights that declare one of the targets can have adapters."""
    for layer in dict.fromkeys(model.layers):
        for role in ("mixer", "feed_forward"):
            term = getattr(layer, role)
            for name, w in term.weights(model).items() if term else ():
                if w.adapter not in names:
                    continue
                path, value = f"model.{layer.name}.{role}: {name}", f"adapter {w.adapter}"
                fix = f"remove {value} from the weight, or {flag('lora.rank', 0)}"
                if not term.uses_products:
                    rule = "needs a component that multiplies by linear.products, with "
                    rule += f"uses_products True: {type(term).__name__} gets plain arrays"
                    raise ConfigError(path, value, rule, fix)
                if not w.columns or w.of_experts:
                    raise ConfigError(path, value, "needs a matrix that all tokens multiply", fix)


def _targets(cfg: Config, model: Model, names: list[str]) -> None:
    path, there = "lora.targets", list(targets_of(model))
    rule, rank = "needs a weight that declares an adapter, and no layer has one", "lora.rank"
    require(bool(there), cfg, rank, rule, flag(rank, 0))
    plain = [name.strip() for name in names]
    near = [m for n in plain for m in difflib.get_close_matches(n, there, n=1, cutoff=0.4)]
    rule = f"must be names from {', '.join(there)}, separated by commas"
    rule += "; experts have no adapters" if experts_in(model) else ""
    fits = flag(path, ",".join(dict.fromkeys(near)) or there[0])
    require(set(names) <= set(there), cfg, path, rule, fits)
    rule, once = "must name each projection once", ",".join(dict.fromkeys(names))
    require(len(set(names)) == len(names), cfg, path, rule, flag(path, once))
