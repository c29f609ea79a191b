"""Rules about the rotary embedding: which dims and layers have it, and its scaling."""

from jaxpar.config import Config, default_of, flag, require
from jaxpar.config.layout.layer_kinds import has_global_layers, is_recurrent

SECTION = "model.rope_scaling"


def rope(cfg: Config) -> None:
    """Check which dims and layers are rotated, and the scaling if there is one."""
    _dims(cfg)
    _layers(cfg)
    if cfg.model.rope_scaling is not None:
        _scaling(cfg)


def _dims(cfg: Config) -> None:
    m, path = cfg.model, "model.head_dim"
    rule = "must be even, since RoPE rotates pairs of elements"
    require(m.head_dim % 2 == 0, cfg, path, rule, flag(path, m.head_dim + 1))
    path = "model.rope_fraction"
    if m.rope_fraction == 0 and is_recurrent(m):
        return
    require(0 < m.rope_fraction <= 1, cfg, path, "must be above 0 and at most 1", flag(path, 1.0))
    rule = f"rotates {m.rotary_dims} of model.head_dim = {m.head_dim} dims, which must be even and "
    rule += "at least 2"
    ok = m.rotary_dims >= 2 and m.rotary_dims % 2 == 0
    require(ok, cfg, path, rule, flag(path, 1.0))


def _layers(cfg: Config) -> None:
    m, p, every = cfg.model, cfg.parallel, "model.nope_every"
    none, four = flag(every, 0), flag(every, 4)
    require(m.nope_every >= 0, cfg, every, "must not be negative", none)
    rule = "leaves no layer with a rotary embedding"
    require(m.nope_every != 1, cfg, every, rule, none, four)
    path, rule = "parallel.layer_loop", f"must be unroll, since layers differ: {every} is "
    ok = m.nope_every == 0 or p.layer_loop == "unroll"
    require(ok, cfg, path, f"{rule}{m.nope_every}", flag(path, "unroll"), none)
    path, beta = "model.nope_query_beta", m.nope_query_beta
    require(beta >= 0, cfg, path, "must not be negative", flag(path, 0.0))
    rule, ways = f"needs {every}, which is 0", (four, flag(path, 0.0))
    require(beta == 0 or m.nope_every > 0, cfg, path, rule, *ways)
    path = "model.nope_query_span"
    rule = "needs model.nope_query_beta, which is 0"
    ok = beta > 0 or m.nope_query_span == default_of(path)
    require(ok, cfg, path, rule, flag("model.nope_query_beta", 0.1), flag(path, default_of(path)))
    path, both = "model.local_rope_scaling", has_global_layers(m) and m.rope_scaling is not None
    rule = f"needs model.global_every and {SECTION}"
    require(both or m.local_rope_scaling, cfg, path, rule, flag(path, True))


def _scaling(cfg: Config) -> None:
    m = cfg.model
    assert m.rope_scaling is not None
    for rule in m.rope_scaling.rules(m.rotary_dims // 2):
        ways = (flag(f"{SECTION}.{field}", value) for field, value in rule.fixes)
        require(rule.ok, cfg, f"{SECTION}.{rule.field}", rule.rule, *ways)
    if m.rope_scaling.kind != "yarn":
        return
    theta, why = "model.rope_theta", "must be above 1 for rope_scaling of kind yarn"
    require(m.rope_theta > 1, cfg, theta, why, flag(theta, default_of(theta)))
    local, theta = m.local_rope_theta, "model.local_rope_theta"
    ok = local is None or local > 1 or not m.local_rope_scaling
    require(ok, cfg, theta, why, flag(theta, None))
