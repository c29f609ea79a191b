"""Mixture of experts: a feed-forward layer of several GLUs, of which each token uses a few.

    route     tokens -> experts and weights                                  `router.py`
    plan      experts -> a row for each pair of token and expert             integers only
    dispatch  tokens -> the devices of their experts                         `parallel/expert/`
    permute   tokens -> rows, sorted by expert
    products  gate and up, activation, down                                  `products.py`
    combine   the rows of each token, added up

The result is exact, and no token is dropped: the buffer holds the rows however they are
distributed. Without an expert axis, every device has all experts of a layer, gathered like other
matrices, and processes its own tokens. On an expert axis, each device has E/n of the experts, and
receives their tokens. F is split over TENSOR, so that its ranks have complete sequences; or else
(`parallel.expert_tensor` 1) its ranks have different experts, and each routes its own tokens, which
then travel over EXPERT and TENSOR (`group_axes`). The backward is written out, so that
only the inputs, gate and up are saved, and the router's gradient needs no output of the experts.

Source:   Shazeer et al. 2017 (1701.06538), equation 1; Gale et al. 2022 (2211.15841), MegaBlocks:
          dropless; Guo et al. 2025 (2512.14080), SonicMoE: what the backward saves.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import Experts
from jaxpar.components.feed_forward import Glu
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named, named_plan
from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.feed_forward import hidden_of
from jaxpar.model.layer import Computation
from jaxpar.model.linear import products, row_parallel
from jaxpar.model.moe import router
from jaxpar.model.moe.products import Products, products_of
from jaxpar.parallel.expert.dispatch import Dispatch, plan_rows
from jaxpar.parallel.expert.tokens import group_axes
from jaxpar.parallel.gradient_buffers import buffers_of_use
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR

type Weights = dict[str, Any]

#: Names in the fused weight layout.
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down", "w_shared_router")


class ExpertWeights(NamedTuple):
    """The weights of the experts here."""

    gate: Any
    up: Any
    down: Any
    """Arrays in the compute dtype or `Float8Weight`s, `Products.expert_dim`. gate: None without."""
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    """float32 [E, F]."""

    @property
    def biases(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Those of gate and up."""
        return self.gate_bias, self.up_bias

    @property
    def into(self) -> tuple[Any, ...]:
        """The matrices that multiply tokens: gate and up, or up alone."""
        return tuple(a for a in (self.gate, self.up) if a is not None)


@flax.struct.dataclass
class Received:
    """The tokens that a device processes: what `received` returns and `dispatched` reads."""

    tokens: jax.Array
    """[B, T/sequence, D]; of spread experts [B, T/(sequence*tensor), D]: what it routes."""
    sequences: jax.Array | None
    """[B, T/sequence, D]: what shared experts read; None if there are none."""


@flax.struct.dataclass
class SentTokens:
    """Tokens on their way to the experts: what `dispatched` returns and `mixture` reads."""

    tokens: jax.Array | None
    """[B, T/sequence, D]: what shared experts read; None if there are none."""
    sent: Any
    """`Dispatch.out` of the tokens."""
    sent_weights: Any
    """`Dispatch.pairs_out` of the router's weights."""
    experts: jax.Array
    """int32 [B, T, k]"""
    weights: jax.Array
    """float32 [B, T, k]"""
    plan: Dispatch
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    """[B, T, D], of the tokens that this device routes."""


@flax.struct.dataclass
class Mixed:
    """Sums over the experts of a device, on their way to the tokens' devices."""

    partial: Any
    """For `Dispatch.home`."""
    here: jax.Array | None
    """[B, T, D]: what this device added for the tokens that it routed."""
    shared: jax.Array | None
    """[B, T/sequence, D]: partial sums over TENSOR of the shared experts."""
    plan: Dispatch
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    """[B, T, D]."""


@flax.struct.dataclass
class Summed:
    """Sums over all experts of a token, on their way to the residual stream."""

    complete: jax.Array | None
    """[B, T/(sequence*tensor), D]: of spread experts."""
    partial: jax.Array | None
    """[B, T/sequence, D]: partial sums over TENSOR, of split experts and shared ones."""


def received(h: NormOutput, w: Weights, name: str, _: AttentionContext, ex: Execution) -> Received:
    """Gather a norm's output over TENSOR: the `receive` of experts.

    Spread experts need this device's tokens alone. Shared experts, which are split over TENSOR,
    need whole sequences.
    """
    own = h.array()
    if not spreads_experts(ex.cfg.parallel):
        (whole,) = Shards.gather(own, in_shards=False).parts
        whole = named(whole, name)
        return Received(whole, whole if SHARED[2] in w else None)
    if SHARED[2] not in w:
        return Received(named(own, name), None)
    (whole,) = Shards.gather(own, in_shards=False).parts
    return Received(own, named(whole, name))


@jax.named_scope("experts")
def dispatched(h: Received, w: Weights, context: AttentionContext, ex: Execution) -> SentTokens:
    """Route tokens, and send them to the devices of their experts.

    Args:     w: router [D, E]; w_gate [E/n, D, F], if n devices share the experts.
    Communication: over `group_axes`, as `Dispatch.out`.
    """
    of, p, x = component(context, Experts), ex.cfg.parallel, h.tokens
    routing = router.route(x, w, of, context)
    _, D, F = w["w_up"].shape
    ids, tile = _by_token(routing.experts), kernels.tile_rows(D, F, x.dtype)
    how = p.expert_slack, ex.expert_dispatch, group_axes(p)
    plan = named_plan(plan_rows(ids, of.num_experts, tile, *how))
    weights = router.observed(routing, plan.further_rounds, w, context, ex.cfg)
    to_experts, of_sums = x, weights
    if of.router.scales_input:  # a token has one expert, and so one weight
        to_experts, of_sums = (x * weights).astype(x.dtype), jnp.ones_like(weights)
    sent = jax.tree.map(lambda a: named(a, "moe_tokens"), plan.out(_by_token(to_experts)))
    sent_weights = named_plan(plan.pairs_out(_by_token(of_sums)))
    return SentTokens(h.sequences, sent, sent_weights, routing.experts, of_sums, plan, x.shape)


def _by_token(a: jax.Array) -> jax.Array:
    return a.reshape(-1, a.shape[-1])


@jax.named_scope("experts")
def mixture(d: SentTokens, w: Weights, context: AttentionContext, ex: Execution) -> Mixed:
    """Apply the experts of this device to the tokens that `dispatched` sent.

    Args:     w: w_gate and w_up [E/n, D, F], w_down [E/n, F, D], compute dtype, if n devices share
              the experts. With `Experts.expert.bias`, float32: b_gate and b_up [E/n, F], b_down
              [E, D].
    Returns:  weighted sums of the experts here: partial ones over TENSOR, if experts are split.
    """
    w = buffers_of_use(w, 0)
    c, of = ex.cfg.compute, component(context, Experts)
    how = products_of(of.expert, c, 1 if ex.gathers_experts else 0)
    there = [name for name in ("w_gate", "w_up", "w_down") if name in w]
    matrices = {name: _named_matrix(w[name]) for name in there}
    if how.expert_dim == 1:  # undo what the gather did last
        matrices = {n: _led_by(a, -1 if n == "w_down" else -2) for n, a in matrices.items()}
    gate, up, down = (matrices.get(name) for name in ("w_gate", "w_up", "w_down"))
    of_experts = ExpertWeights(gate, up, down, w.get("b_gate"), w.get("b_up"))
    keeps = "moe_tokens" in ex.saved_names or "gate_up" not in ex.saved_names
    partial, here = of_sent(how, keeps, d.sent, d.sent_weights, of_experts, d.plan), None
    if "b_down" in w:
        once = spreads_experts(ex.cfg.parallel) or lax.axis_index(TENSOR) == 0
        here = _down_biases(d.experts, d.weights, w["b_down"].astype(c.dtype), once)
    shared = None if d.tokens is None else _shared(d.tokens, w, of.expert)
    return Mixed(partial, here, shared, d.plan, d.shape)


@jax.named_scope("experts")
def collected(out: Mixed) -> Summed:
    """Return the sum for each token that this device routed.

    Communication: over `group_axes`, as `Dispatch.home`.
    """
    total = out.plan.home(out.partial).reshape(out.shape)
    if out.here is not None:
        total = total + out.here
    if TENSOR in out.plan.axes:
        return Summed(total, out.shared)
    return Summed(None, total if out.shared is None else total + out.shared)


def summed(out: Summed) -> jax.Array:
    """Return the sum for each token of this device: the `send` of experts.

    Returns:  [B, T/(sequence*tensor), D].
    Communication: a reduce-scatter over TENSOR, unless experts are spread and none is shared.
    """
    parts = [] if out.complete is None else [out.complete]
    if out.partial is not None:
        parts.append(Shards((out.partial,)).reduce_scatter())
    return functools.reduce(jnp.add, parts)


def decode(h: NormOutput, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """Compute a tensor rank's partial sum of new tokens, which each rank has complete."""
    tokens = h.array()
    received = Received(tokens, tokens if SHARED[2] in w else None)
    sent = dispatched(received, w, context, ex)
    partial = collected(mixture(sent, w, context, ex)).partial
    assert partial is not None
    return partial


def _named_matrix(w: Any) -> Any:
    """Name a matrix, or what is read of a `Float8Weight`, so that a policy can save it. Otherwise
    the backward gathers it again."""
    if isinstance(w, jax.Array):
        return named(w, "moe_weights")
    return w.replace(values=named(w.values, "moe_weights"))


def _led_by(w: Any, dim: int) -> Any:
    """Move a dim of a matrix to the front: of every array but scales."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, dim, 0) if a.ndim else a, w)


@jax.named_scope("down_bias")
def _down_biases(experts: jax.Array, weights: jax.Array, bias: jax.Array, once: Any) -> jax.Array:
    """Compute the weighted sum of the biases of each token's experts, [B, T, D].

    A product of few numbers, at the token's device: rows and their rounds do without them.

    Args:     experts: int32 [B, T, k]. weights: float32 [B, T, k]. bias: [E, D], compute dtype.
              once: whether this device adds them, of those with the same tokens.
    """
    chosen = jax.nn.one_hot(experts, len(bias))
    by_expert = jnp.sum(chosen * weights[..., None], axis=-2)
    return jnp.where(once, by_expert, 0).astype(bias.dtype) @ bias


@jax.named_scope("shared_experts")
def _shared(x: jax.Array, w: Weights, of: Glu) -> jax.Array:
    """Compute the experts that every token uses: this rank's partial sum, [B, T, D]."""
    into = products(x, [w[name] for name in SHARED[:2] if name in w], "mlp_norm")
    out = row_parallel(hidden_of(of, *into), w, SHARED[2], "mlp_hidden")
    return out * _gate_of_shared(x, w[SHARED[3]]) if SHARED[3] in w else out


def _gate_of_shared(x: jax.Array, vector: jax.Array) -> jax.Array:
    """Compute each token's factor of the shared experts' output, [B, T, 1] in x's dtype."""
    number = jnp.sum(x.astype(jnp.float32) * vector, axis=-1, keepdims=True)
    return jax.nn.sigmoid(number).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def of_sent(
    how: Products, keeps: bool, x: Any, weights: Any, w: ExpertWeights, plan: Dispatch
) -> Any:
    """Compute the weighted sum of each token's experts here, without the biases of their outputs.

    Args:     keeps: whether the backward finds x, since a policy saves it, or recomputes it for
              gate and up. Otherwise it sends x again. x: `Dispatch.out` of the tokens, [N, D].
              weights: `Dispatch.pairs_out` of their weights, float32 [N, k].
    Returns:  for `Dispatch.home`.
    """
    return _forward(how, keeps, x, weights, w, plan)[0]


def _forward(how, keeps, x, weights, w, plan):
    gu = _gate_and_up(how, x, w, plan)

    def of_round(plan: Dispatch) -> Any:
        return _output(how, _gate_and_up(how, x, w, plan), weights, w, plan)

    out = plan.in_rounds(of_round, _output(how, gu, weights, w, plan))
    return out, (x, weights, gu, w, plan)


def _gate_and_up(how: Products, x, w, plan: Dispatch) -> tuple[jax.Array, ...]:
    """Compute gate and up of each row, or up alone, without biases: whoever reads them adds
    these."""
    xs = how.rows(plan, x)
    with jax.named_scope("gate_up"):
        return tuple(named(how.times(xs, (a,), plan.tiles), "gate_up") for a in w.into)


def _output(how: Products, gu, weights, w, plan: Dispatch) -> jax.Array:
    """Return the weighted sum of each token's experts here, for `Dispatch.home`."""
    scale, tiles = plan.by_row(weights), plan.tiles
    with jax.named_scope("activation"):
        hidden = how.hidden(gu, scale, tiles, w.biases)
    with jax.named_scope("down"):
        y = how.times(hidden, (w.down,), tiles, transpose=how.expert_dim == 1)
    with jax.named_scope("combine"):
        return plan.added(y)


def _backward(how, keeps, saved, d_out):
    x, weights, gu, w, plan = saved
    d_out = plan.gradient_out(d_out)
    if not keeps:
        x, d_out = plan.sent_again(x, d_out)

    def again(plan: Dispatch) -> RowGradients:
        return _of_rows(how, weights, _gate_and_up(how, x, w, plan), w, plan, d_out)

    def of_tokens(plan: Dispatch):
        return _of_tokens(how, again(plan), w, plan)

    def of_weights(plan: Dispatch):
        return _of_weights(how, again(plan), x, w, plan)

    # Each has its own further rounds, so that gradients of tokens travel while those of weights
    # are computed.
    first = _of_rows(how, weights, gu, w, plan, d_out)
    d_x, d_weights = plan.in_rounds(of_tokens, _of_tokens(how, first, w, plan))
    d_w = plan.in_rounds(of_weights, _of_weights(how, first, x, w, plan))
    # Without this, XLA puts gradients of weights off until the end, and keeps what they are of.
    d_weights, d_w = lax.optimization_barrier((d_weights, d_w))
    d_w = ExpertWeights(*how.gradients(w[:3], d_w[:3]), *d_w.biases)
    to_senders = map(plan.gradient_of_sent, (d_x, d_weights), (x, weights))
    return *to_senders, d_w, None


class RowGradients(NamedTuple):
    """What the gradients of tokens and of weights have in common: values of rows."""

    d_y: jax.Array
    """[R, D]: of each row's output."""
    to_multiply: Any
    """Of gate and up, or of up alone, to multiply."""
    d_inner: Sequence[jax.Array]
    """The same in the compute dtype, [R, F]."""
    hidden: jax.Array
    """[R, F]: the hidden values again, times the row's weight."""
    d_scale: jax.Array
    """float32 [R]: of the row's weight."""


def _of_rows(how: Products, weights, gu, w, plan: Dispatch, d_out) -> RowGradients:
    """Return the gradients of rows, except those of their tokens."""
    (to_multiply, d_y), scale = how.gradient_rows(plan, d_out), plan.by_row(weights)
    with jax.named_scope("down"):
        transpose = how.expert_dim == 0
        d_hidden = how.times(to_multiply, (w.down,), plan.tiles, transpose=transpose)
    with jax.named_scope("activation"):
        to_multiply, made = how.hidden_backward(gu, d_hidden, scale, plan.tiles, w.biases)
        hidden, *d_inner, d_scale = made
    return RowGradients(d_y, to_multiply, d_inner, hidden, d_scale)


def _of_tokens(how: Products, d: RowGradients, w, plan: Dispatch) -> tuple[Any, jax.Array]:
    """Return the gradients of all tokens and of their weights, for `Dispatch.gradient_of_sent`."""
    with jax.named_scope("gate_up"):
        d_xs = how.times(d.to_multiply, w.into, plan.tiles, transpose=True)
    with jax.named_scope("combine"):
        return plan.added(d_xs), plan.by_pair(d.d_scale)


@jax.named_scope("weight_gradients")
def _of_weights(how: Products, d: RowGradients, x, w, plan: Dispatch) -> ExpertWeights:
    """Return the gradients of the experts here."""
    tiles, xs = plan.tiles, plan.permuted(x)
    d_into = [how.outer(xs, d_a, a, tiles) for d_a, a in zip(d.d_inner, w.into, strict=True)]
    pair = (d.hidden, d.d_y) if how.expert_dim == 0 else (d.d_y, d.hidden)
    d_biases = (
        None if bias is None else kernels.bias_gradient(d_a, tiles)
        for bias, d_a in zip(w.biases, (d.d_inner[0], d.d_inner[-1]), strict=True)
    )
    d_gate = None if w.gate is None else d_into[0]
    return ExpertWeights(d_gate, d_into[-1], how.outer(*pair, w.down, tiles), *d_biases)


of_sent.defvjp(_forward, _backward)


EXPERTS = Computation(
    "feed_forward",
    mixture,
    decode,
    receive=received,
    dispatch=dispatched,
    collect=collected,
    send=summed,
)
