"""Rules about the rotary embedding: which dims and layers have it, and its scaling."""

from collections.abc import Sequence

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.layout.layer_kinds import has_global_layers, is_recurrent
from jaxpar.config.lists.rope_factors import in_words, numbers_in

SECTION = "model.rope_scaling"

#: The kinds of scaling that read a field. The others need its default.
READ_BY = {
    "original_max_position": ("llama3", "yarn", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "query_beta": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn", "longrope"),
    "mscale_all_dim": ("yarn",),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
    "turning": ("proportional",),
}


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
    s = cfg.model.rope_scaling
    assert s is not None
    kinds = flag(f"{SECTION}.kind")
    for field, of in READ_BY.items():
        path = f"{SECTION}.{field}"
        default = default_of(path)
        rule = f"needs kind {' or '.join(of)}, not {s.kind}"
        ok = s.kind in of or value_of(cfg, path) == default
        require(ok, cfg, path, rule, f"{kinds} {of[0]}", flag(path, default))
    path = f"{SECTION}.factor"
    require(s.factor >= 1, cfg, path, "must be at least 1", flag(path, 8.0))
    path, least = f"{SECTION}.original_max_position", 2 if s.kind == "longrope" else 1
    good = s.original_max_position >= least
    require(good, cfg, path, f"must be at least {least}", flag(path, 8192))
    path = f"{SECTION}.query_beta"
    require(s.query_beta >= 0, cfg, path, "must not be negative", flag(path, 0.0))
    path, factor = f"{SECTION}.attention_factor", s.attention_factor
    require(factor is None or factor > 0, cfg, path, "must be above 0", flag(path, None))
    path = f"{SECTION}.turning"
    require(0 < s.turning <= 1, cfg, path, "must be above 0 and at most 1", flag(path, 1.0))
    of_kind = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    of_kind.get(s.kind, lambda _: None)(cfg)


def _ordered(
    cfg: Config, low: str, high: str, defaults: Sequence[float], *, equal: bool = False
) -> None:
    paths = [f"{SECTION}.{name}" for name in (low, high)]
    least, most = (value_of(cfg, path) for path in paths)
    rule = f"must be above 0 and {'at most' if equal else 'below'} {high} = {most}"
    ways = " ".join(flag(path, value) for path, value in zip(paths, defaults, strict=True))
    require(0 < least < most or (equal and 0 < least == most), cfg, paths[0], rule, ways)


def _llama3(cfg: Config) -> None:
    _ordered(cfg, "low_freq_factor", "high_freq_factor", (1.0, 4.0), equal=True)  # in Llama 4


def _yarn(cfg: Config) -> None:
    _ordered(cfg, "beta_slow", "beta_fast", (1.0, 32.0), equal=True)  # equal in Kimi K2
    theta, rule = "model.rope_theta", "must be above 1 for rope_scaling of kind yarn"
    require(cfg.model.rope_theta > 1, cfg, theta, rule, flag(theta, default_of(theta)))
    local = cfg.model.local_rope_theta
    theta = "model.local_rope_theta"
    ok = local is None or local > 1 or not cfg.model.local_rope_scaling
    require(ok, cfg, theta, rule, flag(theta, None))


def _longrope(cfg: Config) -> None:
    pairs = cfg.model.rotary_dims // 2
    for name in ("short_factors", "long_factors"):
        path = f"{SECTION}.{name}"
        rule = f"must be {pairs} numbers above 0, separated by commas: one for each pair of dims"
        try:
            numbers = numbers_in(value_of(cfg, path))
        except ValueError:
            numbers = []
        ok = len(numbers) == pairs and all(0 < n < float("inf") for n in numbers)
        require(ok, cfg, path, rule, flag(path, in_words([1.0] * pairs)))
