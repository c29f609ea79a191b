"""Rules about low-rank adapters and their targets."""

import difflib

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.lists.lora_targets import OF_FEED_FORWARD, of_attention, of_recurrence, sides


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
    _targets(cfg)
    smaller = {name: min(sides(cfg.model, name)) for name in cfg.lora.targets.split(",")}
    least = min(smaller, key=smaller.__getitem__)
    rule = f"must be at most {smaller[least]}, the smaller dimension of {least}"
    require(rank <= smaller[least], cfg, path, rule, flag(path, min(16, smaller[least])))


def _targets(cfg: Config) -> None:
    path, names = "lora.targets", cfg.lora.targets.split(",")
    plain = [name.strip() for name in names]
    m, feed_forward = cfg.model, OF_FEED_FORWARD[not cfg.model.mlp_gate :]
    of_layer = (*of_attention(m), *of_recurrence(m), *feed_forward)
    known = of_layer if not m.num_experts else [n for n in of_layer if n not in feed_forward]
    near = [m for n in plain for m in difflib.get_close_matches(n, known, n=1, cutoff=0.4)]
    rule = f"must be names from {', '.join(of_layer)}, separated by commas"
    fits = flag(path, ",".join(dict.fromkeys(near)) or "q_proj,v_proj")
    require(set(names) <= set(of_layer), cfg, path, rule, fits)
    rule, once = "must name each projection once", ",".join(dict.fromkeys(names))
    require(len(set(names)) == len(names), cfg, path, rule, flag(path, once))
    rule = f"cannot target experts, and model.num_experts is {cfg.model.num_experts}"
    left = [name for name in names if name not in OF_FEED_FORWARD] or of_attention(cfg.model)
    ok = cfg.model.num_experts == 0 or not set(names) & set(OF_FEED_FORWARD)
    require(ok, cfg, path, rule, flag(path, ",".join(left)))
    in_every = (*of_attention(m), *feed_forward * ("-" not in m.layer_pattern))
    rule = "must have a matrix of the layers with attention"
    fix = flag(path, ",".join((of_attention(m)[0], *names)))
    require(not m.layer_pattern or bool(set(names) & set(in_every)), cfg, path, rule, fix)
