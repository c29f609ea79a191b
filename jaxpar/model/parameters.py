"""The model's parameters: their specs, and which are trainable."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

from jaxpar.config import Config, LoraConfig, ModelConfig
from jaxpar.config.layout.expert_placement import spreads_experts
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    DELTA_NET,
    FEED_FORWARDS,
    GLOBAL,
    KDA,
    KDA_DENSE,
    MAMBA,
    STACKS,
    has_experts,
    has_feed_forward,
    kinds,
    norms_of,
    of_kind,
)
from jaxpar.model import lora
from jaxpar.model.latent_attention import parameters as latent_attention
from jaxpar.model.mtp import parameters as mtp
from jaxpar.model.mup.widths import scaled
from jaxpar.model.recurrent.parameters import delta_net_specs, kda_specs, mamba_specs
from jaxpar.sharding.params import ParamSpec, on_every_stage, split

type Tree = dict[str, Any]


def param_specs(
    m: ModelConfig, adapters: LoraConfig | None = None, *, spread: bool = False
) -> Tree:
    """Return the specs of the model's parameters: shapes, logical axes, initial distributions.

    Weights are initialized from a normal distribution with standard deviation `init_std`. The two
    matrices that write to the residual stream use init_std / sqrt(2 L), so that its variance does
    not grow with depth (GPT-2, section 2.3). µP changes both (`mup/widths.py`).

    The layers are stacked. With `model.dense_layers`, the first ones have other parameters, and are
    a stack of their own, "dense_layers"; so are the layers of each kind of `model.layer_pattern`.
    The modules of multi-token prediction are "mtp".

    Args:     adapters: `Config.lora`, to include adapters if it has any; None for the base model.
              spread: `spreads_experts`, which only shardings depend on.
    """
    of_kinds = kinds(m)
    layers = functools.partial(_layers, m, spread=spread)
    specs = blocks_with_top(m, layers(of_kinds.count(ATTENTION) - m.dense_layers))
    dense = dataclasses.replace(m, num_experts=0, d_ff=m.dense_d_ff or m.d_ff)
    for kind in sorted(set(of_kinds) - {ATTENTION}):
        of_these = m if has_experts(m, kind) else dense
        specs[STACKS[kind]] = _layers(of_these, of_kinds.count(kind), kind, spread=spread)
    if m.dense_layers:
        specs["dense_layers"] = on_every_stage(_layers(dense, m.dense_layers))
    if m.mtp_depth:
        specs["mtp"] = mtp.specs(m, layers(m.mtp_depth))
    specs = scaled(m, specs)
    return lora.with_adapters(specs, adapters) if adapters and adapters.rank else specs


def specs_of(cfg: Config, *, adapters: bool = True) -> Tree:
    """Return the specs of a run's parameters. Args:     adapters: include those that it has."""
    lora_or_none = cfg.lora if adapters else None
    return param_specs(cfg.model, lora_or_none, spread=spreads_experts(cfg.parallel))


def _layers(m: ModelConfig, count: int, kind: str = ATTENTION, *, spread: bool = False) -> Tree:
    """Return the specs of `count` stacked layers of one kind."""
    D, F = m.d_model, m.d_ff
    deep = m.init_std / math.sqrt(2 * m.base_depth)

    def matrix(shape, axes, std=m.init_std, columns=1):
        shape, axes = (count, *shape), ("layer", *axes)
        return ParamSpec(shape=shape, axes=axes, std=std, columns=columns)

    def vector(shape, axes, init):
        shape, axes = (count, *shape), ("layer", *axes)
        return ParamSpec(shape=shape, axes=axes, init=init, decay=False)

    def gain(shape, axes):
        return vector(shape, axes, init_of_gains(m))

    has_mixer, feeds_forward = kind not in FEED_FORWARDS, has_feed_forward(m, kind)
    branches = ("attn",) * has_mixer + ("mlp",) * feeds_forward
    blocks: Tree = {}
    if kind == DELTA_NET:
        blocks = delta_net_specs(m, matrix, vector, deep)
    elif kind == MAMBA:
        blocks = mamba_specs(m, matrix, vector, deep)
    elif kind in (KDA, KDA_DENSE):
        blocks = kda_specs(m, matrix, vector, deep)
    elif has_mixer and m.kv_lora_rank:
        blocks = latent_attention.specs(m, matrix, gain, deep)
    elif has_mixer:
        blocks = _attention(of_kind(m, kind), matrix, vector, deep)
        if kind == GLOBAL and m.global_keys_as_values:
            del blocks["wv"]
    pre_norms, post_norms = norms_of(m, kind)
    if pre_norms:
        norms = [f"{name}_norm" for name in branches if name == "attn" or not m.shared_norm]
        blocks |= {name: gain((D,), ("norm",)) for name in norms}
        if m.norm == "layer":
            blocks |= {f"{name}_bias": vector((D,), ("norm",), "zeros") for name in norms}
    if post_norms:
        blocks |= {f"{name}_post_norm": gain((D,), ("norm",)) for name in branches}
    if not feeds_forward:
        return blocks
    if m.layer_scale:
        blocks["layer_scale"] = vector((), (), "ones")
    if m.num_experts:
        blocks |= _experts(m, matrix, vector, deep, spread)
    else:
        into = ("w_gate", "w_up") if m.mlp_gate else ("w_up",)
        blocks |= {n: matrix((D, F), ("embed", "mlp")) for n in into}
        blocks["w_down"] = matrix((F, D), ("mlp", "embed"), deep)
    if m.mlp_bias:
        into = ("b_gate", "b_up") if m.mlp_gate else ("b_up",)
        blocks |= {n: vector((F,), ("mlp",), "zeros") for n in into}
        blocks["b_down"] = vector((D,), ("norm",), "zeros")
    return blocks


def _attention(
    m: ModelConfig,
    matrix: Callable[..., ParamSpec],
    vector: Callable[..., ParamSpec],
    deep: float,
) -> Tree:
    """Return the specs of stacked layers' attention. Arguments as in `_experts`."""
    D, H, G, K = m.d_model, m.num_heads, m.num_kv_heads, m.head_dim
    blocks: Tree = {
        "wq": matrix((D, H, K), ("embed", "heads", "head_dim"), columns=2),
        "wk": matrix((D, G, K), ("embed", "kv_heads", "head_dim"), columns=2),
        "wv": matrix((D, G, K), ("embed", "kv_heads", "head_dim"), columns=2),
        "wo": matrix((H, K, D), ("heads", "head_dim", "embed"), deep),
    }
    if m.qk_norm and m.qk_norm_gain and m.qk_norm_over == "head":
        gain = vector((K,), ("head_dim",), init_of_gains(m))
        blocks |= dict.fromkeys(("q_norm", "k_norm"), gain)
    elif m.qk_norm and m.qk_norm_gain:
        blocks["q_norm"] = vector((H, K), ("heads", "head_dim"), init_of_gains(m))
        blocks["k_norm"] = vector((G, K), ("kv_heads", "head_dim"), init_of_gains(m))
    if m.attention_sinks:
        sinks = vector((H,), ("heads",), "normal")
        blocks["sinks"] = dataclasses.replace(sinks, std=m.init_std)
    if m.attention_gate:
        blocks["w_attn_gate"] = matrix((D, H, K), ("embed", "heads", "head_dim"), columns=2)
    if m.qkv_bias:
        blocks["bq"] = vector((H, K), ("heads", "head_dim"), "zeros")
        blocks |= {n: vector((G, K), ("kv_heads", "head_dim"), "zeros") for n in ("bk", "bv")}
    if m.out_bias:
        blocks["bo"] = vector((D,), ("norm",), "zeros")
    return blocks


def _experts(
    m: ModelConfig,
    matrix: Callable[..., ParamSpec],
    vector: Callable[..., ParamSpec],
    deep: float,
    spread: bool,
) -> Tree:
    """Return the specs of stacked layers' routers and experts.

    Args:     matrix, vector: shape and axes of a layer's array, and its distribution -> its spec.
              deep: standard deviation of the matrices that write to the residual stream. spread: as
              in `param_specs`.
    """
    D, E, F = m.d_model, m.num_experts, m.d_ff
    which, wide = ("spread_experts", "whole_mlp") if spread else ("experts", "mlp")
    blocks: Tree = {"router": matrix((D, E), ("embed", "router"), columns=0)}
    if m.router_bias:  # no gradient: a step updates it from the load of each expert
        bias = vector((E,), ("router",), "zeros")
        blocks["router_bias"] = dataclasses.replace(bias, trainable=False)
    if m.router_linear_bias:
        blocks["b_router"] = vector((E,), ("router",), "zeros")
    into = ("gate", "up") if m.mlp_gate else ("up",)
    for name in into:
        blocks[f"w_{name}"] = matrix((E, D, F), (which, "expert_embed", wide))
    blocks["w_down"] = matrix((E, F, D), (which, wide, "expert_embed"), deep)
    if m.expert_bias:
        blocks |= {n: vector((E, F), (which, wide), "zeros") for n in ("b_gate", "b_up")}
        # Every device adds those of its tokens, whichever device has the experts.
        blocks["b_down"] = vector((E, D), ("router", "norm"), "zeros")
    if shared := m.num_shared_experts * F:
        for name in into:
            blocks[f"w_shared_{name}"] = matrix((D, shared), ("embed", "mlp"))
        blocks["w_shared_down"] = matrix((shared, D), ("mlp", "embed"), deep)
    if m.shared_expert_gate:
        gate = vector((D,), ("norm",), "normal")
        blocks["w_shared_router"] = dataclasses.replace(gate, std=m.init_std, decay=True)
    return blocks


def trainable_specs(cfg: Config) -> Tree:
    """Return the specs of the parameters that training updates: all, or only the adapters."""
    specs = specs_of(cfg)
    return split(specs, specs)[0]


def init_of_gains(m: ModelConfig) -> Literal["ones", "zeros"]:
    """Return the initialization of the norms' parameters, such that the gain is 1."""
    return "zeros" if m.norm_offset else "ones"


def blocks_with_top(m: ModelConfig, blocks: Tree) -> Tree:
    """Add the embedding, the final norm and (if untied) the head to the layers' specs."""
    std = m.init_std
    table = ParamSpec(shape=(m.vocab_size, m.d_model), axes=("vocab", "embed"), std=std)
    norm = ParamSpec(shape=(m.d_model,), axes=("norm",), init=init_of_gains(m), decay=False)
    specs = {"embed": table, "layers": blocks, "final_norm": norm}
    if m.norm == "layer":
        specs["final_norm_bias"] = dataclasses.replace(norm, init="zeros")
    if m.positions == "learned":
        specs["positions"] = dataclasses.replace(table, shape=(m.max_positions, m.d_model))
    if not m.tie_embeddings:
        shape = (m.d_model, m.vocab_size)
        specs["head"] = ParamSpec(shape=shape, axes=("embed", "vocab"), std=std)
    return specs
