"""Rules about a mixture of experts: its sizes, its router and what balances it."""

from jaxpar.components.experts import Experts
from jaxpar.config import Config, ModelConfig, default_of, flag, require, value_of
from jaxpar.config.layout.composition import model_of
from jaxpar.config.layout.expert_placement import expert_ways
from jaxpar.config.layout.layer_kinds import EXPERTS, FEED_FORWARD, KDA_DENSE
from jaxpar.config.lists.recorded_steps import MAX_BYTES, MAX_STEPS, bytes_of_a_step, recorded_steps

#: Fields that only a model with experts reads.
OF_EXPERTS = """model.experts_per_token model.normalize_experts model.expert_bias
model.num_shared_experts model.shared_expert_gate model.dense_layers
model.router_score model.router_linear_bias model.router_bias model.router_groups
model.router_groups_per_token model.router_scale model.router_scales_input
train.balance_loss train.balance_over train.router_z_loss train.router_bias_rate
parallel.expert_dispatch parallel.expert_tensor run.record_routing""".split()

COUNT = "model.num_experts"


def experts(cfg: Config) -> None:
    """Check a mixture of experts, and that no option that it does not support is set."""
    m = cfg.model
    _dense_layers(cfg)
    if m.num_experts == 0:
        for path in OF_EXPERTS:
            _needs(cfg, path, f"needs experts, but {COUNT} is 0", flag(COUNT, 8))
        return
    path, rule = "model.experts_per_token", f"must be at most {COUNT} = {m.num_experts}"
    ways = flag(path, m.num_experts), flag(COUNT, m.experts_per_token)
    require(m.experts_per_token <= m.num_experts, cfg, path, rule, *ways)
    _placement(cfg)
    path, axis = "parallel.expert_dispatch", "parallel.expert"
    if expert_ways(cfg.parallel) == 1:
        _needs(cfg, path, f"needs an expert axis, but {axis} is 1", flag(axis, 2))
    _router_gradient(cfg)
    _groups(cfg)
    _balance(cfg)
    _recording(cfg)
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
    path = "model.experts_per_token"
    why, fix = "model.normalize_experts sets its only weight to 1", "model.normalize_experts"
    if cfg.model.post_norms:
        why, fix = "the norm after the experts cancels its only weight", "model.post_norms"
    rule, ways = f"leaves the router without a gradient: {why}", (flag(fix, False), flag(path, 2))
    require(not router_has_no_gradient(cfg.model), cfg, path, rule, *ways)


def router_has_no_gradient(m: ModelConfig) -> bool:
    """Whether tokens use one of several experts with a weight of 1, or with a weight that a norm
    cancels up to its eps. (With a single expert, the gradient is exactly 0.)"""
    for layer in dict.fromkeys(model_of(m).layers):
        of = layer.feed_forward
        if isinstance(of, Experts) and of.num_experts > 1 and of.experts_per_token == 1:
            cancels = layer.norms != "before" and not of.num_shared_experts
            if of.router.normalize or cancels:
                return True
    return False


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
    t, bias, rate = cfg.train, "model.router_bias", "train.router_bias_rate"
    path, loss = "train.balance_over", "train.balance_loss"
    if t.balance_loss == 0:
        _needs(cfg, path, f"needs a balance loss, but {loss} is 0", flag(loss, 1e-3))
    if not cfg.model.router_bias:
        _needs(cfg, rate, f"needs {bias}, which is False", flag(bias, True))
    require(
        t.router_bias_rate > 0, cfg, rate, "must be above 0", flag(rate, 1e-3), flag(bias, False)
    )


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
