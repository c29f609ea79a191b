"""Rules about multi-head latent attention: its sizes, and what it is not combined with."""

from jaxpar.config import Config, default_of, flag, require, value_of
from jaxpar.config.layout.layer_kinds import is_recurrent

RANK = "model.kv_lora_rank"

#: Fields that only latent attention reads.
OF_LATENTS = """model.q_lora_rank model.qk_rope_head_dim model.v_head_dim model.latent_norm_eps
model.rope_scaling.mscale_all_dim""".split()

#: Fields that describe other attention, and why latent attention does not have them.
OF_OTHERS = {
    "model.qk_norm": "it has norms of its latents instead",
    "model.qkv_bias": "its projections have no biases",
    "model.out_bias": "its projections have no biases",
    "model.rope_fraction": "model.qk_rope_head_dim says which dims are rotated",
    "model.query_scale_dim": "scores are divided by the square root of head_dim",
    "model.local_rope_scaling": "the factor of scores of rope_scaling is that of all layers",
    "model.attention": "generation attends to latents, which only softmax attention allows",
    "model.attention_multiplier": "scores are divided by the square root of head_dim",
    "model.attention_softcap": "no kernel of it has been tested with a cap",
    "model.rope_scaling.query_beta": "queries are multiplied by a number of mscale_all_dim",
    "model.attention_gate": "its heads have no gate",
    "model.attention_sinks": "no kernel of it has been tested with them",
}


def latent_attention(cfg: Config) -> None:
    """Check the sizes of latent attention, and that no option of other attention is set."""
    m = cfg.model
    if m.kv_lora_rank == 0:
        for path in OF_LATENTS:
            if path.startswith("model.rope_scaling.") and m.rope_scaling is None:
                continue
            rule = f"needs multi-head latent attention, but {RANK} is 0"
            _default(cfg, path, rule, flag(RANK, 512))
        return
    for path, why in OF_OTHERS.items():
        if path.startswith("model.rope_scaling.") and m.rope_scaling is None:
            continue
        if path == "model.rope_fraction" and m.rope_fraction == 0 and is_recurrent(m):
            continue  # attention without positions of its own
        _default(cfg, path, f"does not apply with {RANK} = {m.kv_lora_rank}: {why}", flag(RANK, 0))
    _sizes(cfg)


def _sizes(cfg: Config) -> None:
    m, path = cfg.model, "model.num_kv_heads"
    rule = f"must be model.num_heads = {m.num_heads}: in latent attention, each head has keys"
    require(m.num_kv_heads == m.num_heads, cfg, path, rule, flag(path, m.num_heads))
    path, rank = "model.q_lora_rank", m.q_lora_rank
    rule = "must be at least 1, or None for queries from the residual stream"
    require(rank is None or rank >= 1, cfg, path, rule, flag(path, None))
    path, dims = "model.qk_rope_head_dim", m.qk_rope_head_dim
    rule = "must be even, since RoPE rotates pairs of elements"
    require(dims % 2 == 0, cfg, path, rule, flag(path, dims + 1))
    rule = f"must be below model.head_dim = {m.head_dim}, which includes these dims"
    require(dims < m.head_dim, cfg, path, rule, flag("model.head_dim", dims + 128))
    path, dims = "model.v_head_dim", m.v_head_dim
    rule = f"must be at most model.head_dim = {m.head_dim}"
    require(dims <= m.head_dim, cfg, path, rule, flag(path, m.head_dim))


def _default(cfg: Config, path: str, rule: str, *ways: str) -> None:
    default = default_of(path)
    require(value_of(cfg, path) == default, cfg, path, rule, flag(path, default), *ways)
