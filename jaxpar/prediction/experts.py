"""Predicts what a layer's experts add: rows, buffers, products, passes and messages.

Letters as in docs/architectures.md: n devices that share experts, N tokens of a device's
microbatch, k experts of a token, E experts, R rows of the buffer. Without an expert axis, n is 1,
and each device has all experts of the layer that it computes.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.components.experts import Experts
from jaxpar.config import Config
from jaxpar.config.layout.placement import expert_parts, expert_ways, token_ways
from jaxpar.config.remat_policies import saved_names
from jaxpar.config.schema.items import Remat
from jaxpar.execution.decisions import on_gpus, rows_per_device
from jaxpar.execution.xla_flag_table import with_experts_apart
from jaxpar.kernels.grouped_matmul import max_rows
from jaxpar.kernels.grouped_matmul.capability import HOPPER_TILE, HOPPER_WARPGROUP
from jaxpar.parallel.expert import plan, rows
from jaxpar.prediction import rates
from jaxpar.prediction.hardware import H200, Gpu
from jaxpar.prediction.layer_kinds import layer_kinds
from jaxpar.prediction.shard import Shard


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
    """Return whether permutes bring the tokens of each device as a separate array."""
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


def dispatched(cfg: Config, of: Experts) -> Dispatched:
    """Return the sizes of a layer with experts."""
    p, N, E, k = cfg.parallel, tokens_of(cfg), of.num_experts, of.experts_per_token
    n, pairs = expert_ways(p), N * k
    here = E // n
    if n == 1:
        R = max_rows(pairs, E, HOPPER_TILE)
        return Dispatched(R, R, R + 3 * pairs, added=2 * (pairs + N))
    if on_gpus(cfg).expert_dispatch == "rows":
        C = rows.capacity(N, k, here, n, p.expert_slack)
        R, most = (max_rows(n * size, here, HOPPER_TILE) for size in (C, N * min(k, here)))
        of_plan = R + 3 * n * C + 5 * pairs
        copied = 2 * messages(cfg) * n * C  # into order, before or after each all-to-all
        return Dispatched(R, most, of_plan, (n - 1) * C, n * C, copied, 2 * (pairs + N))
    R = plan.buffer_rows(pairs, E, n, HOPPER_TILE, p.expert_slack)
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


def _width(cfg: Config, of: Experts) -> float:
    """Return the part of F that a device multiplies."""
    return of.expert.d_ff / expert_parts(cfg.parallel)


def _matrices(of: Experts) -> int:
    """Return the matrices of an expert."""
    return len(of.expert.into) + 1


def buffer_rows(cfg: Config, of: Experts) -> int:
    """Return R, the rows for which a layer has memory."""
    return dispatched(cfg, of).buffer


def saved_rows(cfg: Config, of: Experts) -> float:
    """Return the rows per token of gate and up that a policy saves, with F/tensor values each."""
    whole = cfg.parallel.tensor / expert_parts(cfg.parallel)
    return whole * buffer_rows(cfg, of) / _attended(cfg)


def needs_rounds(cfg: Config, of: Experts) -> bool:
    """Return whether rows may exceed the buffer, so that a layer decides on further rounds."""
    sizes = dispatched(cfg, of)
    return sizes.most > sizes.buffer


def rows_in_use(cfg: Config, of: Experts, shard: Shard) -> float:
    """Return the rows that the fullest rank multiplies: each expert adds half a tile on average."""
    pairs = shard.imbalance * tokens_of(cfg) * of.experts_per_token
    return pairs + HOPPER_TILE / 2 * of.num_experts / expert_ways(cfg.parallel)


def plan_bytes(cfg: Config, of: Experts) -> float:
    """Return the bytes per token of the plan, which every policy saves: int32, and the router's
    weights as they arrive, float32."""
    return 4 * dispatched(cfg, of).of_plan / _attended(cfg)


def saved_bytes(cfg: Config, of: Experts, remat: Remat) -> float:
    """Return the bytes per token that a policy saves of a layer by the names `EXPERT_NAMES`.

    Without an expert axis, tokens are the norm's output, of which the backward then needs no other
    copy.
    """
    m, p, names = cfg.model, cfg.parallel, saved_names(remat)
    width, total = jnp.dtype(cfg.compute.dtype).itemsize, 0.0
    if "moe_tokens" in names:
        received = dispatched(cfg, of).received or tokens_of(cfg)
        total += received * width * m.d_model
    if "moe_weights" in names:
        byte = 1 if cfg.compute.matmul_dtype == "float8" else width
        here = of.num_experts / expert_ways(p)
        total += _matrices(of) * byte * m.d_model * _width(cfg, of) * here
    return total / _attended(cfg)


def backward_bytes(cfg: Config, of: Experts, width: int) -> float:
    """Return the bytes per token of what the backward of a layer's experts computes at once.

    Permuted gradients of the output, hidden values, and three gradients like them (without a gate,
    two); or, once one of these is not needed, also the rows and their gradients. With an expert
    axis, the tokens and the gradients of all, the sums for all, and two of these in pieces.
    """
    m, n = cfg.model, _matrices(of)
    sizes, wide = dispatched(cfg, of), _width(cfg, of)
    values = max(m.d_model + (n + 1) * wide, 3 * m.d_model + n * wide)
    elements = sizes.buffer * values + 5 * sizes.received * m.d_model
    in_8_bits = sizes.buffer * 2 * wide if cfg.compute.matmul_dtype == "float8" else 0
    return (width * elements + in_8_bits) / _attended(cfg)


# ------------------------------------------------------------------------------------------ time


def product_seconds(
    cfg: Config, of: Experts, shard: Shard, gpu: Gpu, repeated: set[str]
) -> dict[str, float]:
    """Return the time of a layer's grouped products in a microbatch, by product."""
    m, wide, n = cfg.model, _width(cfg, of), _matrices(of)
    times = {
        "gate_up": (n - 1) * (1 + ("gate_up" in repeated)),
        "down": 1,
        "to_hidden": 1,
        "to_input": n - 1,
        "weights": n * shard.trainable,
    }
    narrower = rates.matmul_share(m.d_model, wide) / rates.matmul_share(*rates.GROUPED_AT)
    speed = gpu.matmul.value / H200.matmul.value * min(narrower, 1.0)
    flops = 2 * rows_in_use(cfg, of, shard) * m.d_model * wide
    grouped = rates.GROUPED
    if cfg.compute.matmul_dtype == "float8" and gpu.float8 is not None:
        grouped = grouped | rates.GROUPED_FLOAT8
    return {name: count * flops / grouped[name] / speed for name, count in times.items()}


def router_elements(cfg: Config, of: Experts) -> float:
    """Return the elements that take as long as a layer's router and plan in a microbatch."""
    cost = rates.ROUTER
    of_choice = cost["E"] * of.num_experts + cost["k"] * of.experts_per_token
    return tokens_of(cfg) * (cost["D"] * cfg.model.d_model + of_choice)


def moved_elements(cfg: Config, of: Experts, shard: Shard, repeated: set[str]) -> float:
    """Return the elements that a layer's experts read and write in a microbatch.

    Three permutations of rows; the activation, which in the forward runs over the rows in use, or
    without a kernel over the whole buffer; sums of each token's rows, and the copies of an expert
    axis; the gradients of biases. In float8,
    rows that are multiplied are written in 8 bits, those of the output's gradient and of the
    activation's in 16, too; the forward's SwiGLU runs over the rows in use, and that of other
    activations and with biases over the buffer, as does another pass that rounds gradients; and
    matrices are transposed.
    """
    m, wide, expert, n = cfg.model, _width(cfg, of), of.expert, _matrices(of)
    sizes, used = dispatched(cfg, of), rows_in_use(cfg, of, shard)
    permuted = (3 + ("gate_up" in repeated)) * 2 * used
    by_kernel = n == 3 and expert.activation != "gelu" and wide % HOPPER_WARPGROUP == 0
    activation = n * (used if by_kernel else sizes.buffer) + 2 * n * used
    turned = 0.0
    if cfg.compute.matmul_dtype == "float8":
        byte = 1 / shard.width
        permuted += (2 * byte - 1 + (byte - 1) * ("gate_up" in repeated)) * used
        if expert.activation == "silu" and not expert.bias:
            activation = (2 + byte + 6 + 2 * byte) * used
        else:
            activation = (2 + byte + 2 + 2 * byte) * sizes.buffer + 6 * used
        turned = 2 * byte * 3 * m.d_model * wide * of.num_experts / expert_ways(cfg.parallel)
    values = permuted + shard.imbalance * sizes.added + sizes.copied
    activation += 2 * expert.bias * used
    return values * m.d_model + wide * activation + turned + router_elements(cfg, of)


def sent_bytes(cfg: Config, of: Experts, shard: Shard) -> float:
    """Return the bytes that a device sends over the expert axis in a layer and microbatch.

    Besides tokens, the plan's integers, the router's weights, and the gradients of these: three
    times 4 bytes for each pair of token and expert. Besides rows, a weight and its gradient.
    """
    if expert_ways(cfg.parallel) == 1:
        return 0.0
    by_rows = on_gpus(cfg).expert_dispatch == "rows"
    small = 4 * (2 if by_rows else 3 * of.experts_per_token)
    return dispatched(cfg, of).sent * (messages(cfg) * shard.width * cfg.model.d_model + small)


def exposed_share(cfg: Config, of: Experts, shard: Shard, gpu: Gpu, seconds: float) -> float:
    """Return the share of an expert axis's messages that nothing hides.

    The forward's tokens travel during the router and the plan, as do those for gate and up that are
    recomputed; the tokens for the weights' gradients, once the output's gradients have arrived,
    during the products before these; the tokens' gradients home, during the weights' gradients.
    Nothing hides the sums home, nor the output's gradients.

    Args:     seconds: of a layer's messages.
    """
    one = seconds / messages(cfg)
    products = product_seconds(cfg, of, shard, gpu, set())
    passes = router_elements(cfg, of) * shard.width / (gpu.bandwidth.value * rates.ELEMENTWISE)
    during = {"gate_up": passes, "weights": products["to_hidden"] + products["to_input"]}
    behind = (passes, *(during[user] for user in _again(cfg)), products["weights"])
    exposed = 2 * one + math.fsum(max(one - time, 0.0) for time in behind)
    return exposed / seconds


def round_seconds(cfg: Config, shard: Shard) -> float:
    """Return the time of a step's further rounds, and of loops that wait for the host.

    A layer has three loops: one in the forward, and two in the backward, of which each computes the
    gradients of its rows.
    """
    share = sum(k.share for k in layer_kinds(cfg) if k.experts and needs_rounds(cfg, k.experts))
    if not share:
        return 0.0
    beyond = (shard.imbalance - cfg.parallel.expert_slack) / rates.SPREAD_OF_LOADS
    further = min(max(0.5 + beyond, 0.0), 1.0) * rates.FURTHER_ROUND
    before = shard.dense_in_turn if cfg.parallel.pipeline > 1 else 0
    layers = share * (shard.layers_in_turn - before)
    in_graphs = _in_parts(cfg) and with_experts_apart(on_gpus(cfg))
    waits = 0.0 if in_graphs else 3 * rates.ROUND_WAIT
    return (waits + further) * layers * cfg.parallel.num_microbatches
