"""The load of each expert in a step: its metrics, and the update of the router's bias."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.expert_placement import expert_ways
from jaxpar.config.layout.layer_kinds import STACKS, kinds_with_experts
from jaxpar.config.layout.layer_split import is_equal
from jaxpar.model.moe.router import LOSSES
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import AXES, PIPELINE
from jaxpar.step.layer_order import EMPTY, expert_layers_here


@flax.struct.dataclass
class ExpertLoads:
    """What the routers of this stage's layers did with the global batch. The same on each device
    of the stage."""

    rows: jax.Array
    """float32 [layers, E]: tokens that each expert had. Exact up to 2**24, 16 million."""
    losses: jax.Array
    """float32 [layers, 2]: `router.LOSSES`, means over tokens, not yet weighted."""
    further_rounds: jax.Array
    """float32 [layers]: rounds beyond the first, of all microbatches and devices. Devices along
    TENSOR, which have the same rows, count once. 0 without an expert axis."""
    modules: jax.Array | None = None
    """The same as `rows`, of the modules of multi-token prediction. Metrics do not count them."""
    experts: jax.Array | None = None
    """float32 [layers, b, T, k]: the experts of this device's tokens, if routing is recorded; on
    the first rank of TENSOR."""


@jax.named_scope("expert_loads")
def reduce_tallies(
    tallies: jax.Array, tokens: int, cfg: Config, experts: jax.Array | None = None
) -> ExpertLoads:
    """Sum the tallies of a step over devices.

    Args:     tallies: float32 [layers, `router.tally_size`], as gradients of `router.TALLY`. Those
              of the modules of multi-token prediction come last.
              tokens: of the global batch. experts: `ExpertLoads.experts`.
    Communication: an all-reduce over every axis but PIPELINE.
    """
    total = psum(tallies, tuple(axis for axis in AXES if axis != PIPELINE))
    modules = None
    if depth := cfg.model.mtp_depth:
        total, of_modules = total[:-depth], total[-depth:, : cfg.model.num_experts]
        if cfg.parallel.pipeline > 1:  # every stage computes the modules
            of_modules *= lax.axis_index(PIPELINE) == 0
        modules = psum(of_modules, PIPELINE)
    if not is_equal(cfg):  # the router of an empty slot chooses, too
        empty = expert_layers_here(cfg) == EMPTY
        total = jnp.where(empty[:, None], 0, total)
    rows, losses, rounds = jnp.split(total, [cfg.model.num_experts, total.shape[1] - 1], axis=1)
    return ExpertLoads(rows, losses / tokens, rounds[:, 0], modules, experts)


@jax.named_scope("expert_loads")
def load_metrics(loads: ExpertLoads, tokens: int, cfg: Config) -> dict[str, jax.Array]:
    """Compute the metrics of all layers: float32 scalars, the same on every device.

    Communication: two all-reduces over PIPELINE, and two of `_of_ranks`.
    """
    m, rows = cfg.model, loads.rows
    share = rows / jnp.maximum(jnp.sum(rows, axis=1, keepdims=True), 1)
    entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-30)), axis=1)
    entropy /= jnp.log(jnp.float32(max(m.num_experts, 2)))
    sums = jnp.concatenate([jnp.sum(entropy)[None], jnp.sum(loads.losses, axis=0)])
    means = psum(sums, PIPELINE) / len(kinds_with_experts(m))
    dropped = jnp.float32(m.experts_per_token * tokens) - jnp.sum(rows, axis=1)
    dropped = jnp.where(expert_layers_here(cfg) == EMPTY, 0, dropped)
    fullest = jnp.max(share, axis=1) * m.num_experts
    worst = lax.pmax(jnp.stack([jnp.max(fullest), jnp.max(jnp.abs(dropped))]), PIPELINE)
    named = {"expert_entropy": means[0], "fullest_expert": worst[0], "dropped_rows": worst[1]}
    weights = (cfg.train.balance_loss, cfg.train.router_z_loss)
    losses = zip(LOSSES, means[1:], weights, strict=True)
    named |= {name: value for name, value, weight in losses if weight}
    return named | _of_ranks(loads, share, cfg)


def _of_ranks(loads: ExpertLoads, share: jax.Array, cfg: Config) -> dict[str, jax.Array]:
    """Compute the metrics of the devices that share experts. Empty if none do.

    Args:     share: float32 [layers, E], of a layer's rows.
    Communication: two all-reduces over PIPELINE.
    """
    if (n := expert_ways(cfg.parallel)) == 1:
        return {}
    of_rank = jnp.sum(share.reshape(len(share), n, -1), axis=2)
    fullest = jnp.max(of_rank, axis=1) * n  # of each layer; 0 in an empty slot
    sums = psum(jnp.stack([jnp.sum(fullest), jnp.sum(loads.further_rounds)]), PIPELINE)
    return {
        "fullest_rank": lax.pmax(jnp.max(fullest), PIPELINE),
        "fullest_rank_mean": sums[0] / len(kinds_with_experts(cfg.model)),
        "further_rounds": sums[1],
    }


@jax.named_scope("expert_loads")
def rows_of_all_layers(loads: ExpertLoads, cfg: Config) -> jax.Array:
    """Return the rows of all layers with experts, in the model's order.

    Returns:  float32 [layers with experts, E], the same on every device.
    Communication: an all-reduce over PIPELINE.
    """
    m = cfg.model
    layers, count = expert_layers_here(cfg), len(kinds_with_experts(m))
    at = jnp.where(layers == EMPTY, count, layers)
    every = jnp.zeros((count, m.num_experts), jnp.float32)
    return psum(every.at[at].set(loads.rows, mode="drop"), PIPELINE)


def balance_bias(params: Any, loads: ExpertLoads | None, ok: jax.Array, cfg: Config) -> Any:
    """Return the parameters with `router_bias` lowered for experts with more than the mean load,
    and raised for the others.

    Args:     params: may hold no bias. loads: None without experts. ok: whether the step counts.
    Source:   Wang et al. 2024 (2408.15664), algorithm 1; DeepSeek-AI 2024 (2412.19437), section
              2.1.2.
    """
    if loads is None or not cfg.model.router_bias:
        return params
    rate = jnp.where(ok, cfg.train.router_bias_rate, 0.0)

    def balanced(stack: str, rows: jax.Array) -> dict:
        step = rate * jnp.sign(jnp.mean(rows, axis=1, keepdims=True) - rows)
        return {stack: params[stack] | {"router_bias": params[stack]["router_bias"] + step}}

    found = params
    for stack, rows in _rows_by_stack(loads.rows, cfg.model).items():
        found = found | balanced(stack, rows)
    return found if loads.modules is None else found | balanced("mtp", loads.modules)


def _rows_by_stack(rows: jax.Array, m: ModelConfig) -> dict[str, jax.Array]:
    """Split what this stage's layers with experts have, in order, by their stacks."""
    here = kinds_with_experts(m)[: len(rows)]  # a stage has whole periods
    if len(set(here)) == 1:
        return {STACKS[here[0]]: rows}
    places = lambda kind: [i for i, other in enumerate(here) if other == kind]  # noqa: E731
    return {STACKS[kind]: rows[jnp.array(places(kind))] for kind in sorted(set(here))}


def bias_range(params: Any) -> jax.Array:
    """Return the largest difference between the biases of a layer: float32 scalar.

    Communication: an all-reduce over PIPELINE.
    """
    stacks = (params.get(name, {}) for name in STACKS.values())
    biases = [stack["router_bias"] for stack in stacks if "router_bias" in stack]
    ranges = [jnp.max(jnp.max(bias, axis=1) - jnp.min(bias, axis=1)) for bias in biases]
    return lax.pmax(functools.reduce(jnp.maximum, ranges), PIPELINE)
