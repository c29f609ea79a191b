"""Divisibility rules, in one table."""

import math
from typing import NamedTuple

from jaxpar.config import Config, ModelConfig, flag, require, value_of
from jaxpar.config.layout.expert_placement import spreads_experts
from jaxpar.config.layout.layer_kinds import (
    DELTA_NET,
    GLOBAL,
    MAMBA,
    has_kda,
    in_zigzag_order,
    of_kind,
)

#: Sizes of a model that are not of its layers.
OF_MODEL = ("model.d_model", "model.vocab_size", "model.max_positions")


class _Division(NamedTuple):
    """`path` must be divisible by the product of the fields `by`, times `times`."""

    path: str
    by: tuple[str, ...]
    why: str
    times: int = 1

    def divisor(self, cfg: Config) -> int:
        """Return the product. `parallel.data` is included once it is known."""
        return self.times * math.prod(max(value_of(cfg, path), 1) for path in self.by)


def _divisions(cfg: Config) -> list[_Division]:
    p = cfg.parallel
    kv_heads, tensor, pipeline = "model.num_kv_heads", "parallel.tensor", "parallel.pipeline"
    sequence, data, expert = "parallel.sequence", "parallel.data", "parallel.expert"
    rows = ("parallel.replica", data, expert, "parallel.num_microbatches", "parallel.row_groups")
    cut, zigzag = p.sequence > 1, p.sequence > 1 and in_zigzag_order(cfg)
    halves = "in zigzag order, each half of a shard" if zigzag else "each shard of a sequence"
    table = [
        _Division(kv_heads, (tensor,), "tensor ranks get equal numbers of KV heads"),
        _Division("model.num_heads", (kv_heads,), "KV heads serve equal numbers of query heads"),
        _Division("model.d_ff", (tensor,), "tensor ranks get equal shards"),
        _Division("model.vocab_size", (tensor, pipeline), "vocabulary shards have equal sizes"),
        _Division("data.seq_len", (sequence, tensor), f"{halves} has the same length", 1 + zigzag),
        _Division("model.d_model", (data, expert, sequence), "parameters are sharded over it"),
        _Division("train.global_batch_size", rows, "microbatches have equal numbers of rows"),
    ]
    if GLOBAL in cfg.model.layer_pattern and cfg.model.global_num_kv_heads:
        own = "model.global_num_kv_heads"
        table += [
            _Division(own, (tensor,), "tensor ranks get equal numbers of KV heads"),
            _Division("model.num_heads", (own,), "KV heads serve equal numbers of query heads"),
        ]
    if DELTA_NET in cfg.model.layer_pattern or has_kda(cfg.model):
        why = "tensor ranks get equal numbers of heads"
        table.append(_Division("model.linear_num_key_heads", (tensor,), why))
    if MAMBA in cfg.model.layer_pattern:
        why = "tensor ranks get equal numbers of groups, with their heads"
        table.append(_Division("model.mamba_num_groups", (tensor,), why))
    if has_kda(cfg.model):
        why = "the matrices after latents of this width are sharded over it"
        table.append(_Division("model.linear_value_head_dim", (data, expert, sequence), why))
    latents = [n for n in ("kv_lora_rank", "q_lora_rank") if getattr(cfg.model, n)]
    why = "parameters are sharded over it"
    table += [_Division(f"model.{name}", (data, expert, sequence), why) for name in latents]
    if cut and p.context == "ulysses":
        why = "ulysses shards heads in place of the sequence"
        table.append(_Division("model.num_heads", (tensor, sequence), why))
    if cfg.model.max_positions:
        why = "the table of positions is split like the vocabulary"
        table.append(_Division("model.max_positions", (tensor, pipeline), why))
    if cfg.compute.matmul_dtype == "float8":
        table += _float8_divisions(cfg)
    if cfg.model.num_experts:
        why = "devices of the expert axis get equal numbers of experts"
        by: tuple[str, ...] = (expert,)
        if spreads_experts(p):
            why, by = "whole experts are spread over the devices of both axes", (expert, tensor)
        table.append(_Division("model.num_experts", by, why))
    if p.virtual_stages > 1:
        why = "interleaved stages work in whole rounds"
        table.append(_Division("parallel.num_microbatches", (pipeline,), why))
    return table


def _float8_divisions(cfg: Config) -> list[_Division]:
    """cuBLAS requires that the dimensions of float8 matrices are multiples of 16. One dimension is
    the tokens of a device, or of one tensor rank in a collective matmul."""
    why, tensor = "float8 matmuls need dimensions divisible by 16 per device", "parallel.tensor"
    m = cfg.model
    heads = 16 // math.gcd(16, m.head_dim)
    others = []
    if m.kv_lora_rank:
        names = ("kv_lora_rank", "q_lora_rank") if m.q_lora_rank else ("kv_lora_rank",)
        others = [_Division(f"model.{name}", (), why, 16) for name in names]
        others.append(_Division("model.qk_rope_head_dim", (), why, 16))
        heads = 16 // math.gcd(16, m.head_dim, m.v_head_dim)
    if GLOBAL in m.layer_pattern:
        own = "model.global_num_kv_heads" if m.global_num_kv_heads else "model.num_kv_heads"
        wide = 16 // math.gcd(16, of_kind(m, GLOBAL).head_dim)
        others.append(_Division(own, (tensor,), why, wide))
    return [
        *others,
        *_float8_recurrences(m, why),
        _Division("model.d_model", (), why, 16),
        _Division("model.d_ff", (tensor,), why, 16),
        _Division("model.num_kv_heads", (tensor,), why, heads),
        _Division("data.seq_len", ("parallel.sequence", tensor), why, 16),
    ]


def _float8_recurrences(m: ModelConfig, why: str) -> list[_Division]:
    """The projections of a recurrent layer's input are the columns of one matrix, and its heads
    the rows of another."""
    K, V, keys = m.linear_key_head_dim, m.linear_value_head_dim, "model.linear_num_key_heads"
    tensor, found = ("parallel.tensor",), []
    if DELTA_NET in m.layer_pattern:
        served = m.linear_num_value_heads // max(m.linear_num_key_heads, 1)
        of_head = 2 * K + served * (2 * V + 2)
        found.append(_Division(keys, tensor, why, 16 // math.gcd(16, of_head, served * V)))
    if has_kda(m):
        found.append(_Division(keys, tensor, why, 16 // math.gcd(16, 2 * K + V, V)))
    if MAMBA in m.layer_pattern:
        served, P = m.mamba_num_heads // max(m.mamba_num_groups, 1), m.mamba_head_dim
        of_group = served * (2 * P + 1) + 2 * m.mamba_state_size
        times = 16 // math.gcd(16, of_group, served * P)
        found.append(_Division("model.mamba_num_groups", tensor, why, times))
    return found


def divisibility(cfg: Config) -> None:
    """Check every row of the table."""
    table = _divisions(cfg)
    if cfg.model.layers:  # whose components say what divides their fields (`composed.py`)
        table = [r for r in table if r.path in OF_MODEL or not r.path.startswith("model.")]
    for rule in table:
        value, divisor = value_of(cfg, rule.path), rule.divisor(cfg)
        if value % divisor == 0:
            continue
        whole = math.lcm(*(other.divisor(cfg) for other in table if other.path == rule.path))
        factors = [path for path in rule.by if value_of(cfg, path) > 1]
        ways = [flag(rule.path, -(-value // whole) * whole)]
        if rule.path == "model.d_model" and factors:
            ways = _more_replicas(cfg) or ways
        elif rule.times == 1 and len(factors) == 1 and factors != ["parallel.data"]:
            other = flag(factors[0], largest_divisor(value, divisor))
            # Heads and widths belong to the model: the mesh comes first.
            of_mesh = rule.path.startswith("model.") and factors[0].startswith("parallel.")
            ways = [other, *ways] if of_mesh else [*ways, other]
        product = " * ".join(([str(rule.times)] if rule.times > 1 else []) + factors)
        product += f" = {divisor}" if factors else ""
        why = f"must be divisible by {product}, since {rule.why}"
        require(False, cfg, rule.path, why, *ways)


def _more_replicas(cfg: Config) -> list[str]:
    """A fix for `d_model`: the same devices, with parameters sharded over fewer of them."""
    p = cfg.parallel
    fits = [n for n in range(1, p.data) if p.data % n == 0]
    fits = [n for n in fits if cfg.model.d_model % (n * p.expert * p.sequence) == 0]
    if not fits:
        return []
    replicas = p.replica * p.data // fits[-1]
    return [f"{flag('parallel.data', fits[-1])} {flag('parallel.replica', replicas)}"]


def largest_divisor(value: int, at_most: int) -> int:
    """Return the largest divisor of `value` that is at most `at_most`."""
    return max(n for n in range(1, at_most + 1) if value % n == 0)
