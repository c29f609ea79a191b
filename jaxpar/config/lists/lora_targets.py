"""The parameter of each adapter target, and the scale of adapters."""

import math

from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    DELTA_NET,
    GLOBAL,
    KDA,
    KDA_DENSE,
    MAMBA,
    has_kda,
    kinds,
    of_kind,
)

#: Names in `lora.targets` (those of published models), and jaxpar's parameters. in_proj is all
#: projections of a recurrent layer's input, each with an adapter of its own; the others are one of
#: each layer that has such a matrix.
TARGETS = {
    "q_proj": ("wq",),
    "k_proj": ("wk",),
    "v_proj": ("wv",),
    "o_proj": ("wo",),
    "q_a_proj": ("wq_a",),
    "q_b_proj": ("wq_b",),
    "kv_a_proj_with_mqa": ("wkv_a",),
    "kv_b_proj": ("wkv_b",),
    "in_proj": (
        *("delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a"),
        *("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt"),
        *("kda_q", "kda_k", "kda_v", "kda_f_a", "kda_g_a", "kda_b"),
    ),
    "out_proj": ("delta_out", "mamba_out", "kda_out"),
    "gate_proj": ("w_gate",),
    "up_proj": ("w_up",),
    "down_proj": ("w_down",),
}

#: The output dims of recurrent layers, by kind.
_OF_DELTA = "linear_num_value_heads", "linear_value_head_dim"
_OF_RECURRENCE = {
    **dict.fromkeys((DELTA_NET, KDA, KDA_DENSE), _OF_DELTA),
    MAMBA: ("mamba_num_heads", "mamba_head_dim"),
}

#: Targets in a dense feed-forward layer.
OF_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def of_attention(m: ModelConfig) -> tuple[str, ...]:
    """Return the targets in a model's attention."""
    if not m.kv_lora_rank:
        return "q_proj", "k_proj", "v_proj", "o_proj"
    query = ("q_a_proj", "q_b_proj") if m.q_lora_rank else ("q_proj",)
    return *query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"


def of_recurrence(m: ModelConfig) -> tuple[str, ...]:
    """Return the targets in a model's recurrent layers."""
    return ("in_proj", "out_proj") if set(_OF_RECURRENCE) & set(m.layer_pattern) else ()


def sides(m: ModelConfig, target: str) -> tuple[int, int]:
    """Return the input and output dimension of a target's matrix.

    Of matrices that differ between layers, the smaller dimensions.
    """
    D = m.d_model
    alike = [of_kind(m, kind) for kind in (ATTENTION, GLOBAL) if kind in kinds(m)]
    heads = m.num_heads * min(one.head_dim for one in alike)
    kv = min(one.num_kv_heads * one.head_dim for one in alike)
    query, latent = m.q_lora_rank or 0, m.kv_lora_rank
    of_latent = m.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
    of_kinds = [
        getattr(m, heads) * getattr(m, width)
        for kind, (heads, width) in _OF_RECURRENCE.items()
        if kind in m.layer_pattern
    ]
    return {
        "q_proj": (D, heads),
        "k_proj": (D, kv),
        "v_proj": (D, kv),
        "o_proj": (m.num_heads * min(one.value_dim for one in alike), D),
        "q_a_proj": (D, query),
        "q_b_proj": (query, heads),
        "kv_a_proj_with_mqa": (D, latent + m.qk_rope_head_dim),
        "kv_b_proj": (latent, of_latent),
        "in_proj": (D, min(_numbers_per_token(m), default=D)),
        "out_proj": (min(of_kinds, default=D), D),
        "gate_proj": (D, m.d_ff),
        "up_proj": (D, m.d_ff),
        "down_proj": (m.d_ff, D),
    }[target]


def _numbers_per_token(m: ModelConfig) -> list[int]:
    """Return the smallest output dimension of a recurrent layer's projections, of each kind."""
    numbers = [getattr(m, n) for kind, (n, _) in _OF_RECURRENCE.items() if kind in m.layer_pattern]
    return numbers + [m.linear_value_head_dim] * has_kda(m)  # of latents


def factor(cfg: Config) -> float:
    """Return the factor that an adapter's output is multiplied by.

    Source:   Hu et al. 2021 (2106.09685), section 4.1; `rank_stabilized`: Kalajdzievski 2023
              (2312.03732), section 3.
    """
    rank = cfg.lora.rank
    return cfg.lora.alpha / (math.sqrt(rank) if cfg.lora.rank_stabilized else rank)
