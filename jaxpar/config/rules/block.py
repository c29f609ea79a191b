"""Rules about the kind of a layer: its norms, its feed-forward, and how it knows positions."""

from jaxpar.config import Config, default_of, flag, require, value_of

#: Activations of the two kinds of feed-forward.
GATED = ("silu", "gelu", "clamped_swiglu")
PLAIN = ("silu", "gelu", "gelu_exact", "relu_squared")

#: Fields that only rotary embeddings read.
OF_ROPE = ("model.rope_scaling", "model.rope_fraction", "model.rope_layout", "model.nope_every")


def block(cfg: Config) -> None:
    """Check that the parts of a layer fit one another."""
    _feed_forward(cfg)
    _norms(cfg)
    _parallel(cfg)
    _positions(cfg)
    _mixers(cfg)


def _feed_forward(cfg: Config) -> None:
    m, path, gate = cfg.model, "model.activation", "model.mlp_gate"
    allowed = GATED if m.mlp_gate else PLAIN
    rule = f"must be one of {', '.join(allowed)} with {gate} {m.mlp_gate}"
    ways = flag(path, "gelu"), flag(gate, not m.mlp_gate)
    require(m.activation in allowed, cfg, path, rule, *ways)
    ok = m.mlp_gate or m.num_experts == 0
    rule = f"needs a dense feed-forward, but model.num_experts is {m.num_experts}"
    require(ok, cfg, gate, rule, flag(gate, True), flag("model.num_experts", 0))
    targets = cfg.lora.targets.split(",")
    rest = ",".join(name for name in targets if name != "gate_proj") or "q_proj,v_proj"
    ok = m.mlp_gate or not cfg.lora.rank or "gate_proj" not in targets
    rule = f"must not have gate_proj, since {gate} is False"
    require(ok, cfg, "lora.targets", rule, flag("lora.targets", rest))


def _norms(cfg: Config) -> None:
    m, path = cfg.model, "model.norm"
    for other in ("model.post_norms", "model.norm_offset"):
        default = default_of(other)
        ok = m.norm == "rms" or value_of(cfg, other) == default
        rule = f"needs {path} rms, not {m.norm}"
        require(ok, cfg, other, rule, flag(path, "rms"), flag(other, default))


def _parallel(cfg: Config) -> None:
    m, p, path = cfg.model, cfg.parallel, "model.parallel_block"
    shared, groups = "model.shared_norm", "parallel.row_groups"
    rule = f"needs {path}, which is False"
    ok = m.parallel_block or not m.shared_norm
    require(ok, cfg, shared, rule, flag(path, True), flag(shared, False))
    rule = "needs model.pre_norms, which is False"
    ways = flag("model.pre_norms", True), flag(shared, False)
    require(m.pre_norms or not m.shared_norm, cfg, shared, rule, *ways)
    rule = f"must be 1 with {path}, whose branches do not wait for one another"
    require(p.row_groups == 1 or not m.parallel_block, cfg, groups, rule, flag(groups, 1))


def _positions(cfg: Config) -> None:
    m, path, most = cfg.model, "model.positions", "model.max_positions"
    ways: tuple[str, ...]
    if m.positions == "rope":
        rule = f"needs {path} learned, not rope"
        ways = flag(path, "learned"), flag(most, 0)
        require(m.max_positions == 0, cfg, most, rule, *ways)
        return
    rope = flag(path, "rope")
    rule = f"must be at least data.seq_len = {cfg.data.seq_len}: each position has a row"
    ways = (flag(most, cfg.data.seq_len), flag("data.seq_len", m.max_positions or 1))
    ways = ways if m.max_positions else ways[:1]
    require(m.max_positions >= cfg.data.seq_len, cfg, most, rule, *ways)
    for other in OF_ROPE:
        default = default_of(other) if other != "model.rope_scaling" else None
        value = m.rope_scaling if other == "model.rope_scaling" else value_of(cfg, other)
        rule = f"needs {path} rope, not learned"
        require(value == default, cfg, other, rule, f"{rope} {flag(most, 0)}", flag(other, default))


def _mixers(cfg: Config) -> None:
    """Refuse what is not verified beside latent attention and recurrent layers."""
    mixers = {"model.kv_lora_rank": 0, "model.layer_pattern": ""}
    others = {"model.norm": "rms", "model.parallel_block": False, "model.positions": "rope"}
    others |= {"model.mlp_gate": True, "model.attention_softcap": None}
    for mixer, none in mixers.items():
        given = value_of(cfg, mixer)
        if given == none:
            continue
        for other, default in others.items():
            ok = value_of(cfg, other) == default
            ok = ok or (mixer, other) == ("model.layer_pattern", "model.mlp_gate")  # Nemotron-H
            rule = f"is not supported with {mixer} = {given}"
            require(ok, cfg, other, rule, flag(other, default), flag(mixer, none))
