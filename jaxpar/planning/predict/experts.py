"""Predicts what a layer's experts add: rows, buffers, products, passes and messages.

Letters as in docs/experts.md: n devices of the expert axis, N tokens of a device's microbatch, k
experts of a token, E experts, R rows of the buffer. Without an expert axis, n is 1, and each device
has all experts of the layer that it computes.
"""

import math

from jaxpar.config import Config
from jaxpar.execution.decisions import rows_per_device
from jaxpar.kernels.grouped_matmul import max_rows
from jaxpar.kernels.grouped_matmul.capability import HOPPER_TILE
from jaxpar.parallel.expert import plan
from jaxpar.planning.predict import rates
from jaxpar.planning.predict.hardware import H200, Gpu
from jaxpar.planning.predict.shard import Shard

#: Messages of an expert axis in a layer, each of the tokens of n - 1 devices: tokens out and sums
#: home in the forward; the same in the backward, which also gathers the tokens again.
MESSAGES = 5


# ------------------------------------------------------------------------------- rows and memory


def tokens_of(cfg: Config) -> int:
    """Return N."""
    return rows_per_device(cfg) * cfg.data.seq_len // cfg.parallel.sequence


def buffer_rows(cfg: Config) -> int:
    """Return R, the rows for which a layer has memory; 0 without experts."""
    m, n = cfg.model, cfg.parallel.expert
    if not m.num_experts:
        return 0
    pairs = tokens_of(cfg) * m.experts_per_token
    if n == 1:
        return max_rows(pairs, m.num_experts, HOPPER_TILE)
    return plan.buffer_rows(pairs, m.num_experts, n, HOPPER_TILE, cfg.parallel.expert_slack)


def needs_rounds(cfg: Config) -> bool:
    """Return whether rows may exceed the buffer, so that a layer decides on further rounds."""
    m, n = cfg.model, cfg.parallel.expert
    if not m.num_experts or n == 1:
        return False
    all_rows = max_rows(n * tokens_of(cfg) * m.experts_per_token, m.num_experts // n, HOPPER_TILE)
    return all_rows > buffer_rows(cfg)


def rows_in_use(cfg: Config, shard: Shard) -> float:
    """Return the rows that the fullest rank multiplies: each expert adds half a tile on average."""
    m = cfg.model
    pairs = shard.imbalance * shard.tokens * m.experts_per_token
    return pairs + HOPPER_TILE / 2 * m.num_experts / cfg.parallel.expert


def plan_bytes(cfg: Config) -> float:
    """Return the bytes per token of the plan, which every policy saves: int32."""
    m, n = cfg.model, cfg.parallel.expert
    if not m.num_experts:
        return 0.0
    of_all = n * m.experts_per_token * (1 + needs_rounds(cfg)) if n > 1 else m.experts_per_token
    return 4 * (buffer_rows(cfg) / tokens_of(cfg) + m.experts_per_token + of_all)


def backward_bytes(cfg: Config, width: int) -> float:
    """Return the bytes per token of what the backward of a layer's experts computes at once.

    Rows permuted twice and their gradient; hidden values, and three gradients like them; with an
    expert axis, the tokens of all, their gradients, and those of their outputs.
    """
    m, p = cfg.model, cfg.parallel
    if not m.num_experts:
        return 0.0
    rows = buffer_rows(cfg) / tokens_of(cfg)
    of_all = 3 * p.expert * m.d_model if p.expert > 1 else 0
    return width * (rows * (3 * m.d_model + 4 * m.d_ff / p.tensor) + of_all)


# ------------------------------------------------------------------------------------------ time


def product_seconds(cfg: Config, shard: Shard, gpu: Gpu, repeated: set[str]) -> dict[str, float]:
    """Return the time of a layer's grouped products in a microbatch, by product."""
    m, wide = cfg.model, cfg.model.d_ff / cfg.parallel.tensor
    if not m.num_experts:
        return {}
    times = {
        "gate_up": 2 * (1 + ("gate_up" in repeated)),
        "down": 1,
        "to_hidden": 1,
        "to_input": 2,
        "weights": 3 * shard.trainable,
    }
    narrower = rates.matmul_share(m.d_model, wide) / rates.matmul_share(*rates.GROUPED_AT)
    speed = gpu.matmul.value / H200.matmul.value * min(narrower, 1.0)
    flops = 2 * rows_in_use(cfg, shard) * m.d_model * wide
    return {name: count * flops / rates.GROUPED[name] / speed for name, count in times.items()}


def router_elements(cfg: Config, shard: Shard) -> float:
    """Return the elements that take as long as a layer's router and plan in a microbatch."""
    m, cost = cfg.model, rates.ROUTER
    each = cost["D"] * m.d_model + cost["E"] * m.num_experts + cost["k"] * m.experts_per_token
    return shard.tokens * each if m.num_experts else 0.0


def moved_elements(cfg: Config, shard: Shard, repeated: set[str]) -> float:
    """Return the elements that a layer's experts read and write in a microbatch.

    Three permutations of rows; SwiGLU, which in the forward runs over the whole buffer; two sums of
    each token's rows. An expert axis copies gathered tokens three times into one array, and adds
    up the sums of n devices twice.
    """
    m, p, n = cfg.model, cfg.parallel, cfg.parallel.expert
    if not m.num_experts:
        return 0.0
    rows, wide, stream = rows_in_use(cfg, shard), m.d_ff / p.tensor, shard.tokens * m.d_model
    permuted = (3 + ("gate_up" in repeated)) * 2 * m.d_model * rows
    activation = wide * (3 * buffer_rows(cfg) + 6 * rows)
    summed = 2 * (shard.imbalance * m.experts_per_token + n) * stream
    dispatched = (3 * 2 * n + 2 * (n + 1)) * stream if n > 1 else 0.0
    return permuted + activation + summed + dispatched + router_elements(cfg, shard)


def sent_bytes(cfg: Config, shard: Shard) -> float:
    """Return the bytes that a device sends over the expert axis in a layer and microbatch.

    Beside the tokens, their weights, the gradients of these, and the rows of the plan.
    """
    m, n = cfg.model, cfg.parallel.expert
    if n == 1 or not m.num_experts:
        return 0.0
    small = 4 * (3 * m.experts_per_token + 2 * m.experts_per_token)
    return (n - 1) * shard.tokens * (MESSAGES * shard.width * m.d_model + small)


def exposed_share(cfg: Config, shard: Shard, gpu: Gpu, seconds: float) -> float:
    """Return the share of an expert axis's messages that nothing hides.

    The forward's tokens travel during the router and the plan; the tokens gathered again, during
    the products of the backward before the weights' gradients; the gradients home, during those.
    Nothing hides the sums home, nor the output's gradients.

    Args:     seconds: of a layer's messages.
    """
    one = seconds / MESSAGES
    products = product_seconds(cfg, shard, gpu, set())
    passes = router_elements(cfg, shard) * shard.width / (gpu.bandwidth.value * rates.ELEMENTWISE)
    behind = (passes, products["to_hidden"] + products["to_input"], products["weights"])
    exposed = 2 * one + math.fsum(max(one - time, 0.0) for time in behind)
    return exposed / seconds


def round_seconds(cfg: Config, shard: Shard) -> float:
    """Return the time of a step's decisions on further rounds, and of these rounds."""
    if not needs_rounds(cfg):
        return 0.0
    beyond = (shard.imbalance - cfg.parallel.expert_slack) / rates.SPREAD_OF_LOADS
    share = min(max(0.5 + beyond, 0.0), 1.0)
    layers = shard.layers_in_turn - cfg.model.dense_layers
    each = rates.ROUND_DECISION + share * rates.FURTHER_ROUND
    return 2 * each * layers * cfg.parallel.num_microbatches
