"""Sizes of a layer's attention on one tensor rank: values per token, and matmuls."""

from typing import NamedTuple

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import (
    DELTA_NET,
    FEED_FORWARDS,
    MAMBA,
    has_kda,
    is_recurrent,
)
from jaxpar.model.recurrent import delta_net, kimi_delta, mamba


class Widths(NamedTuple):
    """Values per token of attention's arrays on one tensor rank.

    kept      keys and values as the up-projections return them: in latent attention without the
              rotary key, which all heads share.
    latents   of all latents and the rotary key; 0 without latent attention.
    """

    query: float
    key: float
    value: float
    out: float
    kept: float
    latents: float


def widths(m: ModelConfig, tensor: int) -> Widths:
    """Return the widths of a model's attention, or of the recurrence in its place: there, `value`
    and `kept` are all projections of the input."""
    if m.layer_pattern in FEED_FORWARDS:
        return Widths(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if is_recurrent(m):
        of_kind = {DELTA_NET: delta_net, MAMBA: mamba}.get(m.layer_pattern, kimi_delta)
        columns = of_kind.column_sizes(m, tensor)
        values = columns[0] if m.layer_pattern == MAMBA else columns[2]
        return Widths(0.0, 0.0, sum(columns), values, sum(columns), 0.0)
    H, G = m.num_heads / tensor, m.num_kv_heads / tensor
    rotary = m.qk_rope_head_dim if m.kv_lora_rank else 0
    latents = m.kv_lora_rank + rotary + (m.q_lora_rank or 0)
    kept = G * (m.head_dim + m.value_dim - rotary) + rotary
    return Widths(H * m.head_dim, G * m.head_dim, G * m.value_dim, H * m.value_dim, kept, latents)


class Projection(NamedTuple):
    """`times` matmuls of [tokens * share, inner] x [inner, out]."""

    inner: float
    out: float
    times: int = 1
    share: float = 1.0


def projections(m: ModelConfig, tensor: int) -> dict[str, list[Projection]]:
    """Return the matmuls of a layer's attention, by the name of what they compute."""
    w, D = widths(m, tensor), m.d_model
    output = {"wo": [Projection(w.out, D)]}
    if has_kda(m):
        after = m.linear_num_key_heads * (m.linear_key_head_dim + m.linear_value_head_dim) / tensor
        of_latents = Projection(m.linear_value_head_dim, after)
        return {"qkv": [Projection(D, w.value), of_latents]} | output
    if not m.kv_lora_rank:
        gate = w.query if m.attention_gate else 0.0
        return {"qkv": [Projection(D, w.query + w.key + w.value + gate)]} | output
    up = [
        Projection(m.q_lora_rank or D, w.query),
        Projection(m.kv_lora_rank, w.kept - m.qk_rope_head_dim),
    ]
    return {"latents": [Projection(D, w.latents, share=1 / tensor)], "qkv": up} | output


def flops_per_pair(m: ModelConfig) -> float:
    """Return the FLOPs of a forward for one query and one key, in all heads."""
    return 2 * m.num_heads * (m.head_dim + m.value_dim)


def received_width(m: ModelConfig) -> float:
    """Return the values per token that attention gathers over tensor."""
    return (0 if m.q_lora_rank else m.d_model) + widths(m, 1).latents
