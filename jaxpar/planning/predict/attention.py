"""Sizes of a layer's attention on one tensor rank: values per token, and matmuls."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.components.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.composition import model_of
from jaxpar.config.layout.layer_kinds import (
    ATTENTIONS,
    FEED_FORWARDS,
    GLOBAL,
    dense_places,
    has_experts,
    has_feed_forward,
    has_kda,
    is_recurrent,
    kinds,
    of_kind,
)
from jaxpar.config.layout.layer_split import dense_before_stages, slots_per_chunk
from jaxpar.config.remat_policies import of_layers
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
        match model_of(m).layers[0].mixer:
            case Mamba2() as mixer:
                columns = mamba.column_sizes(mixer, tensor)
                values = columns[0]
            case GatedDeltaNet() as mixer:
                columns = delta_net.column_sizes(mixer, tensor)
                values = columns[2]
            case mixer:
                assert isinstance(mixer, KimiDeltaAttention)
                columns = kimi_delta.column_sizes(mixer, tensor)
                values = columns[2]
        return Widths(0.0, 0.0, sum(columns), values, sum(columns), 0.0)
    H, G = m.num_heads / tensor, m.num_kv_heads / tensor
    rotary = m.qk_rope_head_dim if m.kv_lora_rank else 0
    latents = m.kv_lora_rank + rotary + (m.q_lora_rank or 0)
    kept = G * (m.head_dim + m.value_dim - rotary) + rotary
    return Widths(H * m.head_dim, G * m.head_dim, G * m.value_dim, H * m.value_dim, kept, latents)


def widths_of_layers(m: ModelConfig, tensor: int) -> list[Widths]:
    """Return the widths of each layer with attention, or those of one if all have the same."""
    if GLOBAL not in m.layer_pattern:
        return [widths(m, tensor)]
    return [widths(of_kind(m, kind), tensor) for kind in kinds(m) if kind in ATTENTIONS]


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
        values = 0.0 if m.layer_pattern == GLOBAL and m.global_keys_as_values else w.value
        return {"qkv": [Projection(D, w.query + w.key + values + gate)]} | output
    up = [
        Projection(m.q_lora_rank or D, w.query),
        Projection(m.kv_lora_rank, w.kept - m.qk_rope_head_dim),
    ]
    return {"latents": [Projection(D, w.latents, share=1 / tensor)], "qkv": up} | output


def flops_per_pair(m: ModelConfig) -> float:
    """Return the FLOPs of a forward for one query and one key, in all heads."""
    return 2 * m.num_heads * (m.head_dim + m.value_dim)


def reference_work(cfg: Config, rows: int, passes: int) -> tuple[float, float]:
    """Return FLOPs and bytes of attention on a device, with heads that are too wide for kernels.

    Products of all pairs, later keys too, and float32 scores, written and read. An estimate.

    Args:     passes: forward ones; the backward counts as two.
    """
    m, p = cfg.model, cfg.parallel
    pairs = passes * rows * cfg.data.seq_len**2 / p.sequence / p.tensor
    return pairs * flops_per_pair(m), 16 * pairs * m.num_heads


def received_width(m: ModelConfig) -> float:
    """Return the values per token that attention gathers over tensor."""
    return (0 if m.q_lora_rank else m.d_model) + widths(m, 1).latents


# ------ Lists the kinds of a model's layers: attention or not, experts or not, and the remat policy


@dataclass(frozen=True)
class LayerKind:
    """Some layers of a model.

    cfg     a config all of whose layers are of this kind.
    remat   their policy.
    share   their share of the layers.
    """

    cfg: Config
    remat: str
    share: float


def layer_kinds(cfg: Config) -> list[LayerKind]:
    """Return the kinds of layers of the stages.

    Those before the stages of a pipeline are of `before_stages`.
    """
    if cfg.model.layer_pattern:
        return _of_pattern(cfg)
    if not cfg.model.dense_layers:
        return [LayerKind(cfg, remat, share) for remat, share in shares_of_policies(cfg).items()]
    if dense_before_stages(cfg.model, cfg.parallel):
        alike = dataclasses.replace(cfg, model=_dense_and_others(cfg.model)[1])
        return [LayerKind(alike, remat, share) for remat, share in shares_of_policies(cfg).items()]
    m, policies = cfg.model, of_layers(cfg.parallel, cfg.model.num_layers)
    models = dict(zip((True, False), _dense_and_others(m), strict=True))
    dense = dense_places(m)
    counts = Counter((i in dense, remat) for i, remat in enumerate(policies))
    return [
        LayerKind(dataclasses.replace(cfg, model=models[is_dense]), remat, count / m.num_layers)
        for (is_dense, remat), count in counts.items()
    ]


def before_stages(cfg: Config) -> LayerKind:
    """Return the kind of the dense layers before the stages, whose backward computes them again."""
    return LayerKind(dataclasses.replace(cfg, model=_dense_and_others(cfg.model)[0]), "full", 1.0)


# A plan has thousands of layouts of one model. Making a changed copy of it is a third of a
# prediction.
@functools.lru_cache(maxsize=8)
def _dense_and_others(m: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Return models all of whose layers are like the dense ones, or like the others."""
    others = dataclasses.replace(m, dense_layers=0, moe_every=1)
    return dataclasses.replace(others, num_experts=0, d_ff=m.dense_d_ff or m.d_ff), others


def _of_pattern(cfg: Config) -> list[LayerKind]:
    m, policies = cfg.model, of_layers(cfg.parallel, slots_per_chunk(cfg))
    counts = Counter(zip(kinds(m), policies, strict=False))  # chunks have the same kinds
    return [
        LayerKind(of_one_kind(cfg, kind), remat, count / len(policies))
        for (kind, remat), count in counts.items()
    ]


def of_one_kind(cfg: Config, kind: str) -> Config:
    """Return a config all of whose layers are of a kind. Its width is 0 without a feed-forward."""
    return dataclasses.replace(cfg, model=_model_of_one_kind(cfg.model, kind))


@functools.lru_cache(maxsize=32)
def _model_of_one_kind(m: ModelConfig, kind: str) -> ModelConfig:
    width, m = m.d_ff if has_feed_forward(m, kind) else 0, of_kind(m, kind)
    alike = dataclasses.replace(m, layer_pattern=kind)
    if kind not in ATTENTIONS:
        alike = dataclasses.replace(alike, kv_lora_rank=0)
    if has_experts(m, kind):
        return alike
    width = width and (m.dense_d_ff or width)
    return dataclasses.replace(alike, d_ff=width, num_experts=0)


def shares_of_policies(cfg: Config) -> dict[str, float]:
    """Return each policy of the layers, with the share of the layers that have it."""
    p = cfg.parallel
    if not p.remat_layers:
        return {p.remat: 1.0}
    policies = of_layers(p, slots_per_chunk(cfg))
    return {remat: policies.count(remat) / len(policies) for remat in dict.fromkeys(policies)}
