"""Predicts what a layer's experts add: rows, buffers, products, passes and messages.

Letters as in docs/experts.md: n devices that share experts, N tokens of a device's microbatch, k
experts of a token, E experts, R rows of the buffer. Without an expert axis, n is 1, and each device
has all experts of the layer that it computes.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.config.layout.expert_placement import expert_parts, expert_ways, token_ways
from jaxpar.config.layout.layer_kinds import kinds_with_experts
from jaxpar.config.remat_policies import saved_names
from jaxpar.execution.decisions import on_gpus, rows_per_device
from jaxpar.execution.xla_flag_table import with_experts_apart
from jaxpar.kernels.grouped_matmul import max_rows
from jaxpar.kernels.grouped_matmul.capability import HOPPER_TILE, HOPPER_WARPGROUP
from jaxpar.parallel.expert import plan, rows
from jaxpar.planning.predict import rates
from jaxpar.planning.predict.hardware import H200, Gpu
from jaxpar.planning.predict.shard import Shard


def messages(cfg: Config) -> int:
    """Return the messages of an expert axis in a layer: out and home in the forward; the same in
    the backward, which also sends the tokens out again unless they are saved."""
    return 4 + len(_again(cfg))


def _again(cfg: Config) -> tuple[str, ...]:
    """Return what first needs the tokens that the backward sends again: () if they are saved.

    Gradients of weights need them late, gate and up that are recomputed early.
    """
    names = saved_names(cfg.parallel.remat)
    if "moe_tokens" in names:
        return ()
    return ("weights",) if "gate_up" in names else ("gate_up",)


def _in_parts(cfg: Config) -> bool:
    """Return whether permutes bring the tokens of each device as an array of its own."""
    return on_gpus(cfg).expert_dispatch == "tokens" and cfg.parallel.pipeline == 1


# ------------------------------------------------------------------------------- rows and memory


@dataclass(frozen=True)
class Dispatched:
    """Sizes of a layer's experts on a device and microbatch, by the dispatch.

    buffer     R.
    most       rows that would arrive if all tokens chose this device's experts; beyond R, they need
               further rounds.
    of_plan    values of 4 bytes of the plan: integers, and the router's weights that arrive.
    sent       values [D] of a message that leave the device.
    received   values [D] that it has after a message, its own included.
    copied     values [D] read and written for the messages of a layer.
    added      values [D] read and written to add up the rows of tokens, forward and backward.
    """

    buffer: int
    most: int
    of_plan: int
    sent: int = 0
    received: int = 0
    copied: int = 0
    added: float = 0.0


def dispatched(cfg: Config) -> Dispatched:
    """Return the sizes of a layer with experts."""
    m, p, N = cfg.model, cfg.parallel, tokens_of(cfg)
    n, k, pairs = expert_ways(p), m.experts_per_token, N * m.experts_per_token
    here = m.num_experts // n
    if n == 1:
        R = max_rows(pairs, m.num_experts, HOPPER_TILE)
        return Dispatched(R, R, R + 3 * pairs, added=2 * (pairs + N))
    if on_gpus(cfg).expert_dispatch == "rows":
        C = rows.capacity(N, k, here, n, p.expert_slack)
        R, most = (max_rows(n * size, here, HOPPER_TILE) for size in (C, N * min(k, here)))
        of_plan = R + 3 * n * C + 5 * pairs
        copied = 2 * messages(cfg) * n * C  # into order, before or after each all-to-all
        return Dispatched(R, most, of_plan, (n - 1) * C, n * C, copied, 2 * (pairs + N))
    R = plan.buffer_rows(pairs, m.num_experts, n, HOPPER_TILE, p.expert_slack)
    most = max_rows(n * pairs, here, HOPPER_TILE)
    of_plan = R + pairs + n * pairs * (3 if most > R else 2)
    copied = 2 * (n + 1) * N  # the sums of n devices
    if not _in_parts(cfg):
        copied += 3 * 2 * n * N  # gathered into one array
    return Dispatched(R, most, of_plan, (n - 1) * N, n * N, copied, 2 * (pairs + n * N))


def tokens_of(cfg: Config) -> int:
    """Return N: tokens that a device routes."""
    return rows_per_device(cfg) * cfg.data.seq_len // token_ways(cfg.parallel)


def _attended(cfg: Config) -> int:
    """Return the tokens of a device's sequences, to which all sizes per token refer. Spread experts
    route a part of them."""
    return rows_per_device(cfg) * cfg.data.seq_len // cfg.parallel.sequence


def _width(cfg: Config) -> float:
    """Return the part of F that a device multiplies."""
    return cfg.model.d_ff / expert_parts(cfg.parallel)


def _matrices(cfg: Config) -> int:
    """Return the matrices of an expert."""
    return 3 if cfg.model.mlp_gate else 2


def buffer_rows(cfg: Config) -> int:
    """Return R, the rows for which a layer has memory; 0 without experts."""
    return dispatched(cfg).buffer if cfg.model.num_experts else 0


def saved_rows(cfg: Config) -> float:
    """Return the rows per token of gate and up that a policy saves, with F/tensor values each."""
    whole = cfg.parallel.tensor / expert_parts(cfg.parallel)
    return whole * buffer_rows(cfg) / _attended(cfg)


def needs_rounds(cfg: Config) -> bool:
    """Return whether rows may exceed the buffer, so that a layer decides on further rounds."""
    if not cfg.model.num_experts:
        return False
    sizes = dispatched(cfg)
    return sizes.most > sizes.buffer


def rows_in_use(cfg: Config, shard: Shard) -> float:
    """Return the rows that the fullest rank multiplies: each expert adds half a tile on average."""
    m = cfg.model
    pairs = shard.imbalance * tokens_of(cfg) * m.experts_per_token
    return pairs + HOPPER_TILE / 2 * m.num_experts / expert_ways(cfg.parallel)


def plan_bytes(cfg: Config) -> float:
    """Return the bytes per token of the plan, which every policy saves: int32, and the router's
    weights as they arrive, float32."""
    return 4 * dispatched(cfg).of_plan / _attended(cfg) if cfg.model.num_experts else 0.0


def saved_bytes(cfg: Config, remat: str) -> float:
    """Return the bytes per token that a policy saves of a layer by the names `EXPERT_NAMES`.

    Without an expert axis, tokens are the norm's output, of which the backward then needs no other
    copy.
    """
    m, p, names = cfg.model, cfg.parallel, saved_names(remat)
    if not m.num_experts:
        return 0.0
    width, total = jnp.dtype(m.dtype).itemsize, 0.0
    if "moe_tokens" in names:
        received = dispatched(cfg).received or tokens_of(cfg)
        total += received * width * m.d_model
    if "moe_weights" in names:
        byte = 1 if m.matmul_dtype == "float8" else width
        total += _matrices(cfg) * byte * m.d_model * _width(cfg) * m.num_experts / expert_ways(p)
    return total / _attended(cfg)


def backward_bytes(cfg: Config, width: int) -> float:
    """Return the bytes per token of what the backward of a layer's experts computes at once.

    Permuted gradients of the output, hidden values, and three gradients like them (without a gate,
    two); or, once one of these is not needed, also the rows and their gradients. With an expert
    axis, the tokens and the gradients of all, the sums for all, and two of these in pieces.
    """
    m = cfg.model
    if not m.num_experts:
        return 0.0
    sizes, wide = dispatched(cfg), _width(cfg)
    n = _matrices(cfg)
    values = max(m.d_model + (n + 1) * wide, 3 * m.d_model + n * wide)
    elements = sizes.buffer * values + 5 * sizes.received * m.d_model
    in_8_bits = sizes.buffer * 2 * wide if m.matmul_dtype == "float8" else 0
    return (width * elements + in_8_bits) / _attended(cfg)


# ------------------------------------------------------------------------------------------ time


def product_seconds(cfg: Config, shard: Shard, gpu: Gpu, repeated: set[str]) -> dict[str, float]:
    """Return the time of a layer's grouped products in a microbatch, by product."""
    m, wide = cfg.model, _width(cfg)
    if not m.num_experts:
        return {}
    n = _matrices(cfg)
    times = {
        "gate_up": (n - 1) * (1 + ("gate_up" in repeated)),
        "down": 1,
        "to_hidden": 1,
        "to_input": n - 1,
        "weights": n * shard.trainable,
    }
    narrower = rates.matmul_share(m.d_model, wide) / rates.matmul_share(*rates.GROUPED_AT)
    speed = gpu.matmul.value / H200.matmul.value * min(narrower, 1.0)
    flops = 2 * rows_in_use(cfg, shard) * m.d_model * wide
    grouped = rates.GROUPED
    if m.matmul_dtype == "float8" and gpu.float8 is not None:
        grouped = grouped | rates.GROUPED_FLOAT8
    return {name: count * flops / grouped[name] / speed for name, count in times.items()}


def router_elements(cfg: Config, shard: Shard) -> float:
    """Return the elements that take as long as a layer's router and plan in a microbatch."""
    m, cost = cfg.model, rates.ROUTER
    each = cost["D"] * m.d_model + cost["E"] * m.num_experts + cost["k"] * m.experts_per_token
    return tokens_of(cfg) * each if m.num_experts else 0.0


def moved_elements(cfg: Config, shard: Shard, repeated: set[str]) -> float:
    """Return the elements that a layer's experts read and write in a microbatch.

    Three permutations of rows; the activation, which in the forward runs over the rows in use, or
    without a kernel over the whole buffer; sums of each token's rows, and the copies of an expert
    axis; the gradients of biases. In float8,
    rows that are multiplied are written in 8 bits, those of the output's gradient and of the
    activation's in 16, too; the forward's SwiGLU runs over the rows in use, and that of other
    activations and with biases over the buffer, as does another pass that rounds gradients; and
    matrices are transposed.
    """
    m, wide = cfg.model, _width(cfg)
    if not m.num_experts:
        return 0.0
    sizes, used = dispatched(cfg), rows_in_use(cfg, shard)
    permuted = (3 + ("gate_up" in repeated)) * 2 * used
    by_kernel = m.mlp_gate and m.activation != "gelu" and wide % HOPPER_WARPGROUP == 0
    n = _matrices(cfg)
    activation = n * (used if by_kernel else sizes.buffer) + 2 * n * used
    turned = 0.0
    if m.matmul_dtype == "float8":
        byte = 1 / shard.width
        permuted += (2 * byte - 1 + (byte - 1) * ("gate_up" in repeated)) * used
        if m.activation == "silu" and not m.expert_bias:
            activation = (2 + byte + 6 + 2 * byte) * used
        else:
            activation = (2 + byte + 2 + 2 * byte) * sizes.buffer + 6 * used
        turned = 2 * byte * 3 * m.d_model * wide * m.num_experts / expert_ways(cfg.parallel)
    values = permuted + shard.imbalance * sizes.added + sizes.copied
    activation += 2 * m.expert_bias * used
    return values * m.d_model + wide * activation + turned + router_elements(cfg, shard)


def sent_bytes(cfg: Config, shard: Shard) -> float:
    """Return the bytes that a device sends over the expert axis in a layer and microbatch.

    Besides tokens, the plan's integers, the router's weights, and the gradients of these: three
    times 4 bytes for each pair of token and expert. Besides rows, a weight and its gradient.
    """
    m = cfg.model
    if expert_ways(cfg.parallel) == 1 or not m.num_experts:
        return 0.0
    by_rows = on_gpus(cfg).expert_dispatch == "rows"
    small = 4 * (2 if by_rows else 3 * m.experts_per_token)
    return dispatched(cfg).sent * (messages(cfg) * shard.width * m.d_model + small)


def exposed_share(cfg: Config, shard: Shard, gpu: Gpu, seconds: float) -> float:
    """Return the share of an expert axis's messages that nothing hides.

    The forward's tokens travel during the router and the plan, as do those for gate and up that are
    recomputed; the tokens for the weights' gradients, once the output's gradients have arrived,
    during the products before these; the tokens' gradients home, during the weights' gradients.
    Nothing hides the sums home, nor the output's gradients.

    Args:     seconds: of a layer's messages.
    """
    one = seconds / messages(cfg)
    products = product_seconds(cfg, shard, gpu, set())
    passes = router_elements(cfg, shard) * shard.width / (gpu.bandwidth.value * rates.ELEMENTWISE)
    during = {"gate_up": passes, "weights": products["to_hidden"] + products["to_input"]}
    behind = (passes, *(during[user] for user in _again(cfg)), products["weights"])
    exposed = 2 * one + math.fsum(max(one - time, 0.0) for time in behind)
    return exposed / seconds


def round_seconds(cfg: Config, shard: Shard) -> float:
    """Return the time of a step's further rounds, and of loops that wait for the host.

    A layer has three loops: one in the forward, and two in the backward, of which each computes the
    gradients of its rows.
    """
    if not needs_rounds(cfg):
        return 0.0
    beyond = (shard.imbalance - cfg.parallel.expert_slack) / rates.SPREAD_OF_LOADS
    share = min(max(0.5 + beyond, 0.0), 1.0)
    before = shard.dense_in_turn if cfg.parallel.pipeline > 1 else cfg.model.dense_layers
    layers = float(shard.layers_in_turn - before)
    if cfg.model.layer_pattern:
        layers *= len(kinds_with_experts(cfg.model)) / cfg.model.num_layers
    in_graphs = _in_parts(cfg) and with_experts_apart(on_gpus(cfg))
    waits = 0.0 if in_graphs else 3 * rates.ROUND_WAIT
    return (waits + share * rates.FURTHER_ROUND) * layers * cfg.parallel.num_microbatches
