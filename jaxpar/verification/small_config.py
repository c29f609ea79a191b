"""Makes a config small and exact enough to compare meshes."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxpar.components.dims import SmallSizes
from jaxpar.components.model import repetition
from jaxpar.config import Config, DilocoConfig, ModelConfig, ParallelConfig, replace
from jaxpar.config.layout.composition import model_of
from jaxpar.config.layout.layer_kinds import (
    DELTA_NET,
    GLOBAL,
    KDA,
    KDA_DENSE,
    MAMBA,
    has_kda,
    is_recurrent,
    of_kind,
)
from jaxpar.config.layout.layer_split import layer_period, layers_per_chunk
from jaxpar.config.lists.lora_targets import least_side
from jaxpar.config.lists.rope_factors import in_words, numbers_in
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.model.parameters import trainable_specs
from jaxpar.sharding.params import count


def float32(cfg: Config) -> Config:
    """Return the config in float32, with the reference kernels, which run on all devices.

    Replicas sum their gradients: with DiLoCo, each would train on its own.
    """
    return replace(
        cfg,
        diloco=DilocoConfig(),
        **{
            "compute.dtype": "float32",
            "compute.matmul_dtype": "compute",
            "compute.float8_scaling": "tensor",
            "compute.attention_backend": "reference",
            "compute.recurrent_backend": "auto",
            "parallel.grad_reduce": "float32",
            "parallel.gather_dtype": "compute",
            "optimizer.first_moment_dtype": "float32",
            "optimizer.second_moment_dtype": "float32",
            "optimizer.muon_dtype": "float32",
        },
    )


#: The eps of `steady`, relative to the root mean square of all gradients when their norm is 1.
STEADY_EPS = 0.02


def steady(cfg: Config) -> Config:
    """Return the config with a larger eps, so that Adam's update is as continuous as the model.

    If eps is below the rounding error of gradients, an element whose gradient is only rounding
    error moves by up to a full learning rate in either direction. The loss is not linear, so this
    changes all gradients of the next step: by a hundred times the rounding error.
    """
    eps = STEADY_EPS / math.sqrt(count(trainable_specs(cfg)))
    return replace(cfg, **{"optimizer.eps": max(cfg.optimizer.eps, eps)})


#: The least sliding window of a shrunk model. With 1, the gradients of queries are only rounding.
MIN_SLIDING_WINDOW = 4


#: Relative difference of a width's ratio to the original's for which a model need not be larger.
CLOSE = 0.05


#: The least eps of the norms of a shrunk model with recurrent layers. Their norms divide by the
#: length of what a recurrence returned, often near 0 in a small model: with an eps of 1e-5, two
#: orders of the same sums differ by 2e-5 on one device.
RECURRENT_EPS = 1e-2

#: The longest pattern of layers that a shrunk model keeps.
MOST_KINDS = 8


def shrink(cfg: Config, meshes: Sequence[ParallelConfig]) -> Config:
    """Return a small model of the same kind, with sizes that all meshes divide.

    Keeps all flags, but no dense first layers if a mesh has stages; the numbers of layers that
    meshes give to stages; the ratios of query to KV heads, of widths, and of window and RoPE
    scaling to the sequence; and the variance of the output of a matrix. The learning rate starts at
    its peak, so that a few steps change the weights.
    """
    if cfg.model.layers:
        return _composed(cfg, meshes)
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: max(-(-round(size) // of), 1) * of  # noqa: E731
    pattern = _shorter_pattern(cfg.model.layer_pattern)
    cfg = replace(cfg, **{"model.layer_pattern": pattern})
    m, groups = cfg.model, cfg.model.num_heads // cfg.model.num_kv_heads
    head_ways = every(lambda p: p.tensor * (p.sequence if p.context == "ulysses" else 1))
    fewest = up(2, math.lcm(every(lambda p: p.tensor), head_ways // math.gcd(head_ways, groups)))
    head_dim, sharded = 8, every(lambda p: p.data * p.expert * p.sequence)
    for kv_heads in (fewest << n for n in range(5)):  # more, if widths would be far off
        heads = kv_heads * groups
        width = heads * head_dim * m.d_model / (m.num_heads * m.head_dim)
        d_model = max(round(width / sharded), 1) * sharded
        if abs(d_model - width) <= CLOSE * width:
            break
    seq_len = up(32, every(lambda p: p.sequence * p.tensor * 2))
    shorter = seq_len / cfg.data.seq_len
    stages = every(lambda p: p.pipeline * p.virtual_stages)
    d_ff = up(d_model * m.d_ff / m.d_model, every(lambda p: p.tensor))
    unequal = [dataclasses.replace(cfg, parallel=p) for p in meshes if p.layers_per_stage]
    given = [sum(layers_per_chunk(on_mesh)) for on_mesh in unequal]
    before = m.dense_layers > 0 and stages > 1  # a dense layer, before the stages
    values = {
        "model.num_layers": max(given, default=up(2, stages * layer_period(m))) + before,
        "model.d_model": d_model,
        "model.num_heads": heads,
        "model.num_kv_heads": kv_heads,
        "model.head_dim": head_dim,
        "model.d_ff": d_ff,
    }
    values |= _of_run(cfg, meshes, d_model, seq_len)
    values |= _experts(m) if m.num_experts else {}
    values |= _latents(m, head_dim, d_model, sharded) if m.kv_lora_rank else {}
    values |= _global_heads(m, heads, head_dim, every(lambda p: p.tensor))
    values |= _dense(m, d_model, values["model.num_layers"], meshes)
    values |= _recurrent(m, every(lambda p: p.tensor), d_model / m.d_model, sharded)
    values |= _lengths(m, shorter)
    if m.positions == "learned":
        values["model.max_positions"] = up(seq_len, every(lambda p: p.tensor * p.pipeline))
    values |= _score_factors(m, head_dim)
    values |= _base_model(m, d_model, d_ff, head_dim, values["model.num_layers"])
    if m.rope_scaling is not None:
        rotary = values.get("model.qk_rope_head_dim", int(head_dim * m.rope_fraction))
        values |= _rope_scaling(m, rotary, shorter)
    return _adapted(replace(without_schedules(cfg), **values))


def _of_run(
    cfg: Config, meshes: Sequence[ParallelConfig], d_model: int, seq_len: int
) -> dict[str, Any]:
    """Return the fields beside those of layers."""
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: -(-size // of) * of  # noqa: E731
    rows = lambda p: p.replica * p.data * p.expert * p.num_microbatches * p.row_groups  # noqa: E731
    return {
        "model.vocab_size": up(128, every(lambda p: p.tensor * p.pipeline)),
        "model.init_std": cfg.model.init_std * math.sqrt(cfg.model.d_model / d_model),
        "data.seq_len": seq_len,
        "train.global_batch_size": up(8, every(rows)),
        "optimizer.warmup_steps": 0,
        "optimizer.warmup_fraction": 0.0,
    }


def _composed(cfg: Config, meshes: Sequence[ParallelConfig]) -> Config:
    """Return `shrink` of a composed model, whose components say how they get small.

    It has whole periods of its layers: of a long one, the start that has all of its layers.
    """
    every = lambda ways: math.lcm(*map(ways, meshes))  # noqa: E731
    up = lambda size, of: -(-size // of) * of  # noqa: E731
    m, model = cfg.model, model_of(cfg.model)
    d_model = up(min(m.d_model, 64), every(lambda p: p.data * p.expert * p.sequence))
    seq_len = up(32, every(lambda p: p.sequence * p.tensor * 2))
    sizes = SmallSizes.of(model, d_model, seq_len / cfg.data.seq_len, list(meshes))
    start, n = repetition(m.layers)
    leading, period = tuple(dict.fromkeys(m.layers[:start])), m.layers[start : start + n]
    if len(period) > MOST_KINDS:
        period = period[: max(map(period.index, period)) + 1]
    if m.mtp_depth:  # modules are as the last layer: the period ends with it
        end = len(period) - period[::-1].index(m.layers[-1])
        period = period[end:] + period[:end]
    given = [
        sum(layers_per_chunk(dataclasses.replace(cfg, parallel=p)))
        for p in meshes
        if p.layers_per_stage
    ]
    stages = every(lambda p: p.pipeline * p.virtual_stages)
    number = max(given, default=up(2, stages * len(period)))
    layers = [*leading, *itertools.islice(itertools.cycle(period), number)]
    small = m.with_layers([layer.shrunk(sizes) for layer in layers])
    values: dict[str, Any] = {"model": small, "model.d_model": d_model}
    values |= _of_run(cfg, meshes, d_model, seq_len)
    if is_recurrent(m):
        values["model.norm_eps"] = max(m.norm_eps, RECURRENT_EPS)
    if model.max_positions:
        values["model.max_positions"] = up(seq_len, every(lambda p: p.tensor * p.pipeline))
    values |= _base_model(m, d_model, small.d_ff, small.head_dim, len(layers))
    return _adapted(replace(without_schedules(cfg), **values))


def _lengths(m: ModelConfig, shorter: float) -> dict[str, Any]:
    """Shorten the window, the chunks, and the growth of queries with the position."""
    values: dict[str, Any] = {}
    if m.sliding_window is not None:
        least = min(m.sliding_window, MIN_SLIDING_WINDOW)
        values["model.sliding_window"] = max(round(m.sliding_window * shorter), least)
    if m.attention_chunk is not None:
        values["model.attention_chunk"] = max(round(m.attention_chunk * shorter), 2)
    if m.nope_query_beta:
        values["model.nope_query_span"] = max(round(m.nope_query_span * shorter), 1)
    return values


def _score_factors(m: ModelConfig, head_dim: int) -> dict[str, Any]:
    """Return the factors of scores for another head dim, such that scores keep their size."""
    found: dict[str, Any] = {}
    if m.query_scale_dim is not None:
        found["model.query_scale_dim"] = max(round(m.query_scale_dim * head_dim / m.head_dim), 1)
    if m.attention_multiplier is not None:
        factor = m.attention_multiplier * m.head_dim / head_dim
        # Normalized queries and keys have products of sqrt(head_dim), and trained gains less. In
        # front of a softmax, large scores amplify rounding.
        most = head_dim**-0.5 if m.qk_norm else factor
        found["model.attention_multiplier"] = min(factor, most)
    return found


def _base_model(
    m: ModelConfig, d_model: int, d_ff: int, head_dim: int, layers: int
) -> dict[str, Any]:
    """Return the sizes of µP's base model, with the ratios to those of the model."""
    if m.mup is None:
        return {}
    sizes = {
        "base_width": (m.mup.base_width, d_model / m.d_model),
        "base_d_ff": (m.mup.base_d_ff, d_ff / m.d_ff),
        "base_head_dim": (m.mup.base_head_dim, head_dim / m.head_dim),
        "base_depth": (m.mup.base_depth, layers / m.num_layers),
    }
    return {
        f"model.mup.{name}": max(round(size * smaller), 1)
        for name, (size, smaller) in sizes.items()
        if size is not None
    }


def _recurrent(m: ModelConfig, tensor: int, narrower: float, sharded: int) -> dict[str, Any]:
    """Return the sizes of the recurrent layers, and the eps of the model's norms.

    Args:     sharded: devices that a matrix's rows are split over.
    """
    if not is_recurrent(m):
        return {}
    of_kinds = {DELTA_NET: _delta_net, MAMBA: _mamba, KDA: _delta_net, KDA_DENSE: _delta_net}
    there = (of for kind, of in of_kinds.items() if kind in m.layer_pattern)
    sizes = {name: size for of in there for name, size in of(m, tensor, narrower).items()}
    if has_kda(m):  # also the width of latents
        width = sizes["model.linear_value_head_dim"]
        sizes["model.linear_value_head_dim"] = -(-width // sharded) * sharded
    if m.linear_norm_eps is not None:
        sizes["model.linear_norm_eps"] = max(m.linear_norm_eps, RECURRENT_EPS)
    return sizes | {"model.norm_eps": max(m.norm_eps, RECURRENT_EPS)}


def _mamba(m: ModelConfig, tensor: int, narrower: float) -> dict[str, Any]:
    """Return the sizes of Mamba-2, with two heads in a group."""
    groups = math.lcm(2, tensor)
    return {
        "model.mamba_num_groups": groups,
        "model.mamba_num_heads": 2 * groups,
        "model.mamba_head_dim": max(round(m.mamba_head_dim * narrower), 4),
        "model.mamba_state_size": max(round(m.mamba_state_size * narrower), 4),
        "model.recurrent_chunk": min(m.recurrent_chunk, 5),
    }


def _shorter_pattern(pattern: str) -> str:
    """Return the start of a long pattern that has all of its kinds."""
    if len(pattern) <= MOST_KINDS:
        return pattern
    return pattern[: max(map(pattern.index, set(pattern))) + 1]


def _delta_net(m: ModelConfig, tensor: int, narrower: float) -> dict[str, Any]:
    """Return the sizes of Gated DeltaNet, with as many value heads per key head."""
    heads = math.lcm(2, tensor)
    return {
        "model.linear_num_key_heads": heads,
        "model.linear_num_value_heads": heads * m.linear_num_value_heads // m.linear_num_key_heads,
        "model.linear_key_head_dim": max(round(m.linear_key_head_dim * narrower), 4),
        "model.linear_value_head_dim": max(round(m.linear_value_head_dim * narrower), 4),
        "model.recurrent_chunk": min(m.recurrent_chunk, 5),
    }


def _adapted(cfg: Config) -> Config:
    """Return the config with adapters that fit their matrices, and the factor of the config."""
    lora = cfg.lora
    if not lora.rank:
        return cfg
    sides = (least_side(model_of(cfg.model), target) for target in lora.targets.split(","))
    rank = min(lora.rank, *sides)
    return replace(cfg, **{"lora.rank": rank, "lora.alpha": lora.alpha * rank / lora.rank})


def _experts(m: ModelConfig) -> dict[str, Any]:
    """Return the numbers of experts: a few in each of the router's groups."""
    in_group = min(m.num_experts // m.router_groups, 8 if m.router_groups == 1 else 2)
    to_choose = in_group * m.router_groups_per_token
    return {
        "model.num_experts": in_group * m.router_groups,
        "model.experts_per_token": min(m.experts_per_token, 4, to_choose),
    }


def _dense(
    m: ModelConfig, d_model: int, layers: int, meshes: Sequence[ParallelConfig]
) -> dict[str, Any]:
    """Return the fields of dense layers: one, or those between experts, which no pipeline has."""
    if m.dense_d_ff is None and not m.dense_layers:
        return {}
    if m.moe_every > 1 and any(p.pipeline > 1 for p in meshes):
        return {"model.dense_layers": 0, "model.dense_d_ff": None, "model.moe_every": 1}
    tensor = math.lcm(*(p.tensor for p in meshes))
    wide = (m.dense_d_ff or m.d_ff) * d_model / m.d_model
    fields = {"model.dense_d_ff": -(-round(wide) // tensor) * tensor}
    if not m.dense_layers:  # of a pattern of layers
        return fields
    if m.moe_every > 1:
        return fields | {"model.dense_layers": layers - layers // m.moe_every}
    return fields | {"model.dense_layers": 1}


def _latents(m: ModelConfig, head_dim: int, d_model: int, sharded: int) -> dict[str, Any]:
    """Return the fields of latent attention: the ratios to the widths of heads and the model."""
    of_head = lambda size: max(round(size * head_dim / m.head_dim / 2), 1) * 2  # noqa: E731
    rank = lambda size: max(round(size * d_model / m.d_model / sharded), 1) * sharded  # noqa: E731
    return {
        "model.qk_rope_head_dim": min(of_head(m.qk_rope_head_dim), head_dim - 2),
        "model.v_head_dim": of_head(m.v_head_dim),
        "model.kv_lora_rank": rank(m.kv_lora_rank),
        "model.q_lora_rank": rank(m.q_lora_rank) if m.q_lora_rank else None,
    }


def _global_heads(m: ModelConfig, heads: int, head_dim: int, tensor: int) -> dict[str, Any]:
    """Return the heads of layers of kind A: the ratios to those of the others."""
    if GLOBAL not in m.layer_pattern:
        return {}
    own = of_kind(m, GLOBAL)
    fits = [n for n in range(tensor, heads + 1, tensor) if heads % n == 0]
    wanted = heads * own.num_kv_heads / m.num_heads
    return {
        "model.global_num_kv_heads": min(fits, key=lambda n: abs(n - wanted)),
        "model.global_head_dim": max(round(head_dim * own.head_dim / m.head_dim / 2), 1) * 2,
    }


def _rope_scaling(m: ModelConfig, dims: int, shorter: float) -> dict[str, Any]:
    """Return the fields of RoPE scaling that depend on the sequence and on the rotated dims."""
    s, section = m.rope_scaling, "model.rope_scaling"
    assert s is not None
    found: dict[str, Any] = {}
    if s.kind not in ("linear", "proportional"):
        least = max(round(s.original_max_position * shorter), 2)
        found[f"{section}.original_max_position"] = least
    if s.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            factors = numbers_in(getattr(s, name))
            step = len(factors) / (dims // 2)
            some = [factors[int(pair * step)] for pair in range(dims // 2)]
            found[f"{section}.{name}"] = in_words(some)
    return found
