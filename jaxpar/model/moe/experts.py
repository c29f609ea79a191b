"""Mixture of experts: a feed-forward layer of several GLUs, of which each token uses a few.

    route     tokens -> experts and weights                                  `router.py`
    plan      experts -> a row for each pair of token and expert             integers only
    permute   tokens -> rows, sorted by expert
    products  gate and up, activation, down                                  `grouped_matmul`
    combine   the rows of each token, added up

The result is exact, and no token is dropped: the buffer holds the rows however they are
distributed. Every device has all experts of a layer, gathered like other matrices, and processes
its own tokens. F is split over TENSOR. The backward is written out, so that only the inputs, gate
and up are saved, and the router's gradient needs no output of the experts.

Source:   Shazeer et al. 2017 (1701.06538), equation 1; Gale et al. 2022 (2211.15841), MegaBlocks:
          dropless; Guo et al. 2025 (2512.14080), SonicMoE: what the backward saves.
"""

import functools
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named, named_plan
from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.feed_forward import gated
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.moe import router
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]

#: Names in the fused weight layout.
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
WEIGHTS = ("router", "router_bias", router.TALLY, "w_gate", "w_up", "w_down", *SHARED)

f32 = jnp.float32


@flax.struct.dataclass
class RowPlan:
    """Where each row comes from, and where each token's rows are. Integers without gradients."""

    tiles: kernels.Tiles
    token: jax.Array
    """int32 [R]: the token of each row; 0 for padding."""
    rows: jax.Array
    """int32 [N, k]: the row of each of a token's experts."""


@dataclass(frozen=True)
class Products:
    """How the products are computed."""

    model: ModelConfig
    expert_dim: int
    """0: weights are [E, D, F] and [E, F, D]. 1: all are [D, E, F], as FSDP's gather over D leaves
    them, so that they are not copied."""


def mixture(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Apply the experts to complete sequences. The result is a partial sum over TENSOR."""
    return h.map(_of_shard, w, context, ex)


def received(h: NormOutput, _: Weights, name: str, ex: Execution) -> Shards:
    """Gather a norm's output over TENSOR: the `receive` of experts, which need whole sequences."""
    return Shards.gather(h.operand, in_shards=False).each(lambda x: NormOutput(named(x, name)))


@jax.named_scope("experts")
def _of_shard(h: NormOutput, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """Compute the weighted sum of each token's experts: this rank's partial sum, [B, T, D].

    Args:     w: router [D, E]; w_gate and w_up [E, D, F], w_down [E, F, D], compute dtype.
    """
    m, x = ex.cfg.model, h.operand
    routing = router.route(x, w, m)
    weights = router.with_losses(routing, w, context.loss_weight, ex.cfg)
    E, D, F = w["w_gate"].shape
    tile = kernels.tile_rows(D, F, x.dtype)
    by_token = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    plan = named_plan(plan_rows(by_token(routing.experts), E, tile))
    how = Products(m, 1 if ex.gathers_per_layer else 0)
    matrices = tuple(w[name] for name in ("w_gate", "w_up", "w_down"))
    if how.expert_dim == 1:  # undo what the gather did last
        matrices = tuple(jnp.moveaxis(a, d, 0) for a, d in zip(matrices, (-2, -2, -1), strict=True))
    out = of_rows(how, by_token(x), by_token(weights), matrices, plan).reshape(x.shape)
    return out + _shared(x, w, m) if SHARED[0] in w else out


@jax.named_scope("shared_experts")
def _shared(x: jax.Array, w: Weights, m: ModelConfig) -> jax.Array:
    """Compute the experts that every token uses: this rank's partial sum, [B, T, D]."""
    gate, up = products(x, [w[SHARED[0]], w[SHARED[1]]], "mlp_norm")
    return row_parallel(gated(gate, up, m), w, SHARED[2], "mlp_hidden")


@jax.named_scope("plan")
def plan_rows(experts: jax.Array, num_experts: int, tile: int) -> RowPlan:
    """Give each pair of token and expert a row: sorted by expert, then by token.

    Args:     experts: int32 [N, k]. tile: rows of a tile, of which an expert's rows begin a new
              one.
    """
    N, k = experts.shape
    flat, index = experts.reshape(-1), jnp.arange(N * k, dtype=jnp.int32)
    expert, pair = lax.sort((flat, index), num_keys=1, is_stable=True)
    # By comparison: `bincount` is a scatter with collisions.
    is_of = flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(is_of, axis=0, dtype=jnp.int32)
    R = kernels.max_rows(N * k, num_experts, tile)
    tiles = kernels.tiles_of(counts, R, tile)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    row = tiles.starts[expert] + index - before[expert]
    token = _scattered(R, row, pair // k)
    return RowPlan(tiles, token, _scattered(N * k, pair, row).reshape(N, k))


def _scattered(size: int, at: jax.Array, values: jax.Array) -> jax.Array:
    """Return zeros [size] with values at distinct places."""
    zeros = jnp.zeros(size, values.dtype)
    return zeros.at[at].set(values, unique_indices=True, mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_rows(how: Products, x: jax.Array, weights: jax.Array, w: tuple, plan: RowPlan) -> jax.Array:
    """Compute the weighted sum of each token's experts.

    Args:     x: [N, D]. weights: float32 [N, k]. w: gate, up and down (`Products.expert_dim`).
    Returns:  [N, D].
    """
    return _forward(how, x, weights, w, plan)[0]


def _forward(how, x, weights, w, plan):
    gate, up, down = w
    multiply = functools.partial(
        kernels.grouped_matmul, tiles=plan.tiles, expert_dim=how.expert_dim
    )
    xs, scale = _permuted(x, plan), _by_row(weights, plan)
    with jax.named_scope("gate_up"):
        g, u = (named(multiply(xs, a), "gate_up") for a in (gate, up))
    with jax.named_scope("activation"):
        hidden = _hidden(g.astype(f32), u.astype(f32), scale, how).astype(g.dtype)
    with jax.named_scope("down"):
        y = multiply(hidden, down, transpose=how.expert_dim == 1)
    with jax.named_scope("combine"):
        out = kernels.rows_added(y, plan.rows)
    return out, (x, weights, g, u, w, plan)


def _backward(how, saved, d_out):
    x, weights, g, u, (gate, up, down), plan = saved
    tiles, ed = plan.tiles, how.expert_dim
    multiply = functools.partial(kernels.grouped_matmul, tiles=tiles, expert_dim=ed)
    outer = functools.partial(kernels.grouped_outer, tiles=tiles, expert_dim=ed, dtype=gate.dtype)
    d_y, scale = _permuted(d_out, plan), _by_row(weights, plan)
    with jax.named_scope("down"):
        d_hidden = multiply(d_y, down, transpose=ed == 0)
    with jax.named_scope("activation"):
        hidden, d_gate, d_up, d_scale = _hidden_backward(g, u, d_hidden, scale, plan, how)
    with jax.named_scope("gate_up"):
        d_xs = multiply((d_gate, d_up), (gate, up), transpose=True)
    with jax.named_scope("combine"):
        d_x = kernels.rows_added(d_xs, plan.rows)
        d_weights = d_scale.at[plan.rows].get(mode="promise_in_bounds")
    with jax.named_scope("weight_gradients"):
        xs = _permuted(x, plan)
        d_w = outer(xs, d_gate), outer(xs, d_up)
        d_down = outer(hidden, d_y) if ed == 0 else outer(d_y, hidden)
    return d_x, d_weights, (*d_w, d_down), None


of_rows.defvjp(_forward, _backward)


@jax.named_scope("permute")
def _permuted(x: jax.Array, plan: RowPlan) -> jax.Array:
    """Return the token of each row: [N, D] -> [R, D]. Padding has the first token."""
    return x.at[plan.token].get(mode="promise_in_bounds")


def _by_row(weights: jax.Array, plan: RowPlan) -> jax.Array:
    """Return the weight of each row: [N, k] -> [R]. 0 for padding."""
    return _scattered(len(plan.token), plan.rows.reshape(-1), weights.reshape(-1))


def _hidden(gate, up, scale, how: Products) -> jax.Array:
    return gated(gate, up, how.model) * scale[:, None]


def _hidden_backward(gate, up, d_hidden, scale, plan: RowPlan, how: Products):
    """Return the hidden values again, and the gradients of gate, up and scale."""
    if how.model.activation == "silu":
        return kernels.swiglu_backward(gate, up, d_hidden, scale, plan.tiles)
    wide = (a.astype(f32) for a in (gate, up))
    hidden, pullback = jax.vjp(functools.partial(_hidden, how=how), *wide, scale)
    d_gate, d_up, d_scale = pullback(d_hidden.astype(f32))
    return *(a.astype(gate.dtype) for a in (hidden, d_gate, d_up)), d_scale
