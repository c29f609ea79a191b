"""Rules about a mixture of experts: its sizes, its router and what balances it."""

from typing import cast

from jaxpar.components.experts import Experts, experts_in
from jaxpar.components.model import Layer
from jaxpar.config import Config, ModelConfig, default_of, flag, require, value_of
from jaxpar.config.fields import refused
from jaxpar.config.layout.composition import model_of
from jaxpar.config.layout.expert_placement import expert_ways
from jaxpar.config.layout.layer_kinds import EXPERTS, FEED_FORWARD, KDA_DENSE
from jaxpar.config.lists.recorded_steps import MAX_BYTES, MAX_STEPS, bytes_of_a_step, recorded_steps

#: Flags that only a model with experts reads.
OF_FLAGS = """model.experts_per_token model.normalize_experts model.expert_bias
model.num_shared_experts model.shared_expert_gate model.dense_layers
model.router_score model.router_linear_bias model.router_bias model.router_groups
model.router_groups_per_token model.router_scale model.router_scales_input""".split()

#: Fields of runs that do.
OF_RUNS = """train.balance_loss train.balance_over train.router_z_loss train.router_bias_rate
parallel.expert_dispatch parallel.expert_tensor run.record_routing""".split()

COUNT = "model.num_experts"


def experts(cfg: Config) -> None:
    """Check a mixture of experts, and that no option that it does not support is set."""
    m = cfg.model
    if not m.layers:
        _dense_layers(cfg)
    if not experts_in(model_of(m)):
        for path in OF_RUNS if m.layers else (*OF_FLAGS, *OF_RUNS):
            some = () if m.layers else (flag(COUNT, 8),)
            none = "no layer has any" if m.layers else f"{COUNT} is 0"
            _needs(cfg, path, f"needs experts, but {none}", *some)
        return
    if not m.layers:
        _flags(cfg)
    _placement(cfg)
    path, axis = "parallel.expert_dispatch", "parallel.expert"
    if expert_ways(cfg.parallel) == 1:
        _needs(cfg, path, f"needs an expert axis, but {axis} is 1", flag(axis, 2))
    _router_gradient(cfg)
    _balance(cfg)
    _recording(cfg)


def _flags(cfg: Config) -> None:
    """Check the flags of a model without layers; otherwise components have these rules."""
    m = cfg.model
    path, rule = "model.experts_per_token", f"must be at most {COUNT} = {m.num_experts}"
    ways = flag(path, m.num_experts), flag(COUNT, m.experts_per_token)
    require(m.experts_per_token <= m.num_experts, cfg, path, rule, *ways)
    _groups(cfg)
    path, one = "model.router_scales_input", "model.experts_per_token"
    rule = f"needs {one} 1, not {m.experts_per_token}: a token is sent once, with one weight"
    ok = m.experts_per_token == 1 or not m.router_scales_input
    require(ok, cfg, path, rule, flag(path, False), flag(one, 1))
    path, scale = "model.router_scale", m.router_scale
    require(scale > 0, cfg, path, "must be above 0", flag(path, 1.0))
    dense = f"needs a dense feed-forward layer, but {COUNT} is {m.num_experts}"
    path, needed = "model.shared_expert_gate", "model.num_shared_experts"
    ok = m.num_shared_experts > 0 or not m.shared_expert_gate
    require(ok, cfg, path, f"needs {needed}, which is 0", flag(path, False), flag(needed, 1))
    path, none = "model.mlp_bias", flag(COUNT, 0)
    require(not m.mlp_bias, cfg, path, dense, flag(path, False), none)


def _placement(cfg: Config) -> None:
    """Check how many tensor ranks split an expert."""
    path, p = "parallel.expert_tensor", cfg.parallel
    rule = f"must be 0 or parallel.tensor = {p.tensor} (all tensor ranks), or 1 (whole experts)"
    require(p.expert_tensor in (0, 1, p.tensor), cfg, path, rule, flag(path, 0), flag(path, 1))


def _dense_layers(cfg: Config) -> None:
    """Check the first layers without experts."""
    m, path, width = cfg.model, "model.dense_layers", "model.dense_d_ff"
    _between(cfg)
    if m.dense_layers == 0:
        letters = set(m.layer_pattern)
        if not {FEED_FORWARD, EXPERTS} <= letters and KDA_DENSE not in letters:
            _needs(cfg, width, f"needs {path}, which is 0", flag(path, 1))
        else:
            _dense_width(cfg)
        return
    rule = f"must be below model.num_layers = {m.num_layers}, so that some layers have experts"
    ok = m.dense_layers < m.num_layers
    require(ok, cfg, path, rule, flag(path, 0), flag("model.num_layers", m.dense_layers + 1))
    _dense_width(cfg)


def _dense_width(cfg: Config) -> None:
    """Check the width of dense layers beside layers with experts."""
    m, width = cfg.model, "model.dense_d_ff"
    ok = m.dense_d_ff is None or m.dense_d_ff >= 1
    require(ok, cfg, width, "must be at least 1, or None for model.d_ff", flag(width, None))
    wide, tensor = m.dense_d_ff or m.d_ff, cfg.parallel.tensor
    rule = f"must be divisible by parallel.tensor = {tensor}, since tensor ranks get equal shards"
    require(wide % tensor == 0, cfg, width, rule, flag(width, -(-wide // tensor) * tensor))


def _between(cfg: Config) -> None:
    """Check dense layers between layers with experts."""
    m, path, every = cfg.model, "model.dense_layers", "model.moe_every"
    if m.moe_every == 1:
        return
    one = flag(every, 1)
    rule = f"needs experts, but {COUNT} is 0"
    require(m.num_experts > 0, cfg, every, rule, one, flag(COUNT, 8))
    rule = f"leaves no layer with experts of model.num_layers = {m.num_layers}"
    require(m.moe_every <= m.num_layers, cfg, every, rule, one)
    rule = "has no effect: the letters of model.layer_pattern say which layers have experts"
    require(not m.layer_pattern, cfg, every, rule, one)
    wanted = m.num_layers - m.num_layers // m.moe_every
    rule = f"must be {wanted}, the layers without experts: every {m.moe_every}th has them"
    require(m.dense_layers == wanted, cfg, path, rule, flag(path, wanted))


def _needs(cfg: Config, path: str, rule: str, *ways: str) -> None:
    """Check that a field has its default, since what it needs is not there."""
    default = default_of(path)
    require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default), *ways)


def _router_gradient(cfg: Config) -> None:
    # p / p is 1 whatever the router computes: AdamW would turn rounding noise into updates.
    layer = without_router_gradient(cfg.model)
    if layer is None:
        return
    composed, of = bool(cfg.model.layers), cast(Experts, layer.feed_forward)
    where = f"model.{layer.name}.feed_forward" if composed else "model"
    path = f"{where}.experts_per_token"
    off: tuple[str, bool | str]
    if of.router.normalize:
        off = f"{where}.router.normalize" if composed else "model.normalize_experts", False
        why = f"{off[0]} sets its only weight to 1"
    else:
        off = (f"model.{layer.name}.norms", "before") if composed else ("model.post_norms", False)
        why = "the norm after the experts cancels its only weight"
    rule = f"leaves the router without a gradient: {why}"
    raise refused(path, of.experts_per_token, rule, flag(*off), flag(path, 2))


def without_router_gradient(m: ModelConfig) -> Layer | None:
    """Return a layer whose tokens use one of several experts with a weight of 1, or with a weight
    that a norm cancels up to its eps. (With a single expert, the gradient is exactly 0.)"""
    for layer in model_of(m).distinct:
        of = layer.feed_forward
        if isinstance(of, Experts) and of.num_experts > 1 and of.experts_per_token == 1:
            cancels = layer.norms != "before" and not of.num_shared_experts
            if of.router.normalize or cancels:
                return layer
    return None


def _groups(cfg: Config) -> None:
    m, path, per_token = cfg.model, "model.router_groups", "model.router_groups_per_token"
    groups, k = m.router_groups, m.experts_per_token
    rule = f"must divide {COUNT} = {m.num_experts}"
    fits = max(n for n in range(1, m.num_experts + 1) if m.num_experts % n == 0 and n <= groups)
    require(m.num_experts % groups == 0, cfg, path, rule, flag(path, fits))
    ok, rule = m.router_groups_per_token <= groups, f"must be at most {path} = {groups}"
    require(ok, cfg, per_token, rule, flag(per_token, groups))
    size = m.num_experts // groups
    rule = f"leaves {m.router_groups_per_token * size} experts of which to choose {k}"
    ok = m.router_groups_per_token * size >= k
    require(ok, cfg, per_token, rule, flag(per_token, -(-k // size)), flag(path, 1))


def _balance(cfg: Config) -> None:
    t, rate, model = cfg.train, "train.router_bias_rate", model_of(cfg.model)
    path, loss = "train.balance_over", "train.balance_loss"
    if t.balance_loss == 0:
        _needs(cfg, path, f"needs a balance loss, but {loss} is 0", flag(loss, 1e-3))
    bias = ["model.router_bias"]
    if cfg.model.layers:
        of = [layer.name for layer in model.distinct if isinstance(layer.feed_forward, Experts)]
        bias = [f"model.{name}.feed_forward.router.balancing_bias" for name in of]
    if not any(one.router.balancing_bias for one in experts_in(model)):
        on = " ".join(flag(path, True) for path in bias)
        _needs(cfg, rate, f"needs {bias[0]}, which is False", on)
    off = " ".join(flag(path, False) for path in bias)
    require(t.router_bias_rate > 0, cfg, rate, "must be above 0", flag(rate, 1e-3), off)


def _recording(cfg: Config) -> None:
    """Check the steps whose routing is recorded, and the size of their files."""
    path, last = "run.record_routing", cfg.train.num_steps
    try:
        steps = recorded_steps(cfg)
    except ValueError:
        rule = "must be numbers of steps, separated by commas"
        require(False, cfg, path, rule, flag(path, f"1,{last}"))
        return
    if not steps:
        return
    rule = f"must name steps of the run, from 1 to train.num_steps = {last}"
    ok = steps[0] >= 1 and steps[-1] <= last
    ways = flag(path, last), flag("train.num_steps", steps[-1])
    require(ok, cfg, path, rule, *ways[: 1 + (steps[0] > 0)])
    shown, size = ",".join(map(str, steps[: MAX_STEPS // 10])), bytes_of_a_step(cfg)
    rule = f"names {len(steps)} steps, and must name at most {MAX_STEPS}"
    require(len(steps) <= MAX_STEPS, cfg, path, rule, flag(path, shown))
    rule = f"records {len(steps)} steps of {size:,} bytes, and must record at most {MAX_BYTES:,}"
    fits = ",".join(map(str, steps[: MAX_BYTES // size]))
    require(len(steps) * size <= MAX_BYTES, cfg, path, rule, flag(path, fits))
