"""Rules about `model.layer_pattern`: layers of several kinds, some of them recurrent."""

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    ATTENTIONS,
    DELTA_NET,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARDS,
    GLOBAL,
    KDA,
    KDA_DENSE,
    MAMBA,
    STACKS,
    has_kda,
    is_recurrent,
    of_kind,
)

PATH = "model.layer_pattern"

#: Fields that only layers of a kind read.
_OF_KIND = {
    GLOBAL: """model.global_head_dim model.global_num_kv_heads
    model.global_keys_as_values""".split(),
    DELTA_NET: ["model.linear_allow_neg_eigval"],
    DELTA_NET + KDA + KDA_DENSE: """model.linear_num_key_heads model.linear_num_value_heads
    model.linear_key_head_dim model.linear_value_head_dim model.linear_norm_eps""".split(),
    MAMBA: """model.mamba_num_heads model.mamba_head_dim model.mamba_state_size
    model.mamba_num_groups model.mamba_min_step""".split(),
    DELTA_NET + MAMBA + KDA + KDA_DENSE: """model.conv_kernel_size model.recurrent_chunk
    compute.recurrent_backend model.recurrent_norms""".split(),
}

#: What `kernels/recurrence/capability.py` declares: widths of keys and chunks, and a divisor of
#: widths of values.
KEYS, CHUNKS, VALUES = (64, 128), (32, 64), 64


def layer_pattern(cfg: Config) -> None:
    """Check the pattern, the sizes of its layers, and what it is combined with."""
    m, none = cfg.model, flag(PATH, "")
    for kinds, paths in _OF_KIND.items():
        for path in paths:
            rule = f"needs a layer of kind {' or '.join(kinds)} in {PATH}, "
            rule += f"which is {m.layer_pattern!r}"
            there = not set(kinds).isdisjoint(m.layer_pattern)
            ok = there or value_of(cfg, path) == default_of(path)
            require(ok, cfg, path, rule, flag(path, default_of(path)))
    if not m.layer_pattern:
        return
    rule = f"must be of the letters {' '.join(STACKS)}"
    require(set(m.layer_pattern) <= set(STACKS), cfg, PATH, rule, none, flag(PATH, "GGG*"))
    rule = "must have a layer with attention (*)"
    require(ATTENTION in m.layer_pattern, cfg, PATH, rule, flag(PATH, m.layer_pattern + "*"), none)
    period, path = len(m.layer_pattern), "model.num_layers"
    rule = f"must be a multiple of {period}, the length of {PATH}"
    ok = m.num_layers % period == 0
    require(ok, cfg, path, rule, flag(path, -(-m.num_layers // period) * period), none)
    _global_layers(cfg)
    _sizes(cfg)
    _kernels(cfg)
    _combinations(cfg)


def _global_layers(cfg: Config) -> None:
    """Check the layers of kind A: global attention with heads of its own."""
    m = cfg.model
    if GLOBAL not in m.layer_pattern:
        return
    said, plain = f"has layers of kind {GLOBAL}", m.layer_pattern.replace(GLOBAL, ATTENTION)
    same = flag(PATH, plain)
    rule = f"has other layers than {' and '.join(ATTENTIONS)}: beside {GLOBAL}, none are verified"
    require(set(m.layer_pattern) <= set(ATTENTIONS), cfg, PATH, rule, same, flag(PATH, "*****A"))
    path, rule = (
        "model.sliding_window",
        f"must be a number: {PATH} {said}, and others have a window",
    )
    require(m.sliding_window is not None, cfg, path, rule, flag(path, 1024), same)
    for path, wanted in {
        "model.global_every": 0,
        "model.nope_every": 0,
        "model.kv_lora_rank": 0,
    }.items():
        rule = f"must be {wanted}: {PATH} {said}"
        require(value_of(cfg, path) == wanted, cfg, path, rule, flag(path, wanted), same)
    for path in ("model.global_head_dim", "model.global_num_kv_heads"):
        value = value_of(cfg, path)
        rule = "must be at least 1, or None for that of the other layers"
        require(value is None or value >= 1, cfg, path, rule, flag(path, None))
    own = of_kind(m, GLOBAL)
    path, rule = "model.global_head_dim", "must be even, since RoPE rotates pairs of elements"
    require(own.head_dim % 2 == 0, cfg, path, rule, flag(path, own.head_dim + 1))
    rule = (
        f"rotates {own.rotary_dims} dims by model.rope_fraction, which must be even and at least 2"
    )
    ok = own.rotary_dims >= 2 and own.rotary_dims % 2 == 0
    require(ok, cfg, path, rule, flag("model.rope_fraction", 1.0))


def _sizes(cfg: Config) -> None:
    m = cfg.model
    if not is_recurrent(m):
        return
    path = "model.linear_num_value_heads"
    rule = f"must be a multiple of model.linear_num_key_heads = {m.linear_num_key_heads}"
    heads, keys = m.linear_num_value_heads, m.linear_num_key_heads
    require(heads % keys == 0, cfg, path, rule, flag(path, -(-heads // keys) * keys))
    rule = f"must be model.linear_num_key_heads = {keys}: in Kimi Delta Attention ({KDA}), each "
    require(heads == keys or not has_kda(m), cfg, path, f"{rule}head has a key", flag(path, keys))
    path, heads, groups = "model.mamba_num_heads", m.mamba_num_heads, m.mamba_num_groups
    rule = f"must be a multiple of model.mamba_num_groups = {groups}"
    require(heads % groups == 0, cfg, path, rule, flag(path, -(-heads // groups) * groups))
    path, eps = "model.linear_norm_eps", m.linear_norm_eps
    require(eps is None or eps > 0, cfg, path, "must be above 0", flag(path, None))
    path, rule = "model.mamba_min_step", "must not be negative"
    require(m.mamba_min_step >= 0, cfg, path, rule, flag(path, 0.0))
    path, shard = "model.conv_kernel_size", cfg.data.seq_len // cfg.parallel.sequence
    require(m.conv_kernel_size >= 2, cfg, path, "must be at least 2", flag(path, 4))
    rule = f"must be at most {shard + 1}: a shard of a sequence sends its last tokens to the next"
    ok = m.conv_kernel_size - 1 <= shard
    require(ok, cfg, path, rule, flag("data.seq_len", 64 * cfg.parallel.sequence))


def _kernels(cfg: Config) -> None:
    """Check what the Triton kernels of recurrences need, without a device."""
    m, path = cfg.model, "compute.recurrent_backend"
    if cfg.compute.recurrent_backend != "triton":
        return
    auto, for_kernels = flag(path, "auto"), f"for {path} = triton"
    rule = f"must be {' or '.join(map(str, CHUNKS))} {for_kernels}"
    size = "model.recurrent_chunk"
    require(m.recurrent_chunk in CHUNKS, cfg, size, rule, flag(size, CHUNKS[-1]), auto)
    widths = {
        DELTA_NET: ("model.linear_key_head_dim", "model.linear_value_head_dim"),
        MAMBA: ("model.mamba_state_size", "model.mamba_head_dim"),
    }
    for kind, (keys, values) in widths.items():
        if kind in m.layer_pattern:
            rule = f"must be {' or '.join(map(str, KEYS))} {for_kernels}"
            require(value_of(cfg, keys) in KEYS, cfg, keys, rule, flag(keys, KEYS[-1]), auto)
            width = value_of(cfg, values)
            rule = f"must be a multiple of {VALUES} {for_kernels}"
            fits = flag(values, -(-width // VALUES) * VALUES)
            require(width % VALUES == 0, cfg, values, rule, fits, auto)


def _combinations(cfg: Config) -> None:
    """Refuse what layers of several kinds do not support yet."""
    p, none = cfg.parallel, flag(PATH, "")
    said = f"does not support {PATH}, which is {cfg.model.layer_pattern}"
    path, rule = "model.dense_layers", f"{said}: both split the layers into stacks"
    require(cfg.model.dense_layers == 0, cfg, path, rule, flag(path, 0), none)
    _experts(cfg, said)
    periods, path = cfg.model.num_layers // len(cfg.model.layer_pattern), "parallel.pipeline"
    rule = f"must divide the {periods} repetitions of {PATH}, so that stages have the same layers"
    fits = max(n for n in range(1, p.pipeline + 1) if periods % n == 0)
    require(periods % p.pipeline == 0, cfg, path, rule, flag(path, fits))


def _experts(cfg: Config, said: str) -> None:
    """Check that layers of kind E have experts, those of kind - none, and those of kind k a
    feed-forward that differs from that of others."""
    m, path = cfg.model, "model.num_experts"
    if KDA_DENSE in m.layer_pattern:
        rule = f"must be above 0: layers of kind {KDA_DENSE} in {PATH} differ from those of {KDA} "
        alike = flag(PATH, m.layer_pattern.replace(KDA_DENSE, KDA))
        require(m.num_experts > 0, cfg, path, rule + "beside experts only", flag(path, 8), alike)
        rule = f"has layers of kind {KDA_DENSE}, which have no feed-forward beside {FEED_FORWARD} "
        beside = set(FEED_FORWARDS) & set(m.layer_pattern)
        require(not beside, cfg, PATH, f"{rule}or {EXPERTS}", alike)
    if EXPERTS in m.layer_pattern:
        rule = f"must be above 0: {PATH} has layers with experts ({EXPERTS})"
        dense = flag(PATH, m.layer_pattern.replace(EXPERTS, FEED_FORWARD))
        require(m.num_experts > 0, cfg, path, rule, flag(path, 8), dense)
    elif FEED_FORWARD in m.layer_pattern:
        rule = f"{said}: feed-forward layers ({FEED_FORWARD}) are dense"
        some = flag(PATH, m.layer_pattern.replace(FEED_FORWARD, EXPERTS))
        require(m.num_experts == 0, cfg, path, rule, flag(path, 0), some)
