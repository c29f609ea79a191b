"""The router: which experts a token is sent to, with which weights, and the losses that balance it.

    softmax   probabilities over all experts; the k largest (Qwen3-MoE, OLMoE). Normalized to sum to
              1, they equal a softmax over the k largest logits (Mixtral, gpt-oss).
    sigmoid   independent scores; the k largest of score plus bias, weighted by the scores
              (DeepSeek-V3, GLM-4.5).

With `Router.groups`, experts are in groups, and a token chooses groups before experts. Everything
is float32. The ranks of TENSOR have complete sequences, and compute the same; or, if experts are
spread over them, each has some tokens. Gradients flow through the weights; the choice has none.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import Experts
from jaxpar.config import Config
from jaxpar.config.layout.placement import spreads_experts
from jaxpar.execution.remat import named_plan
from jaxpar.model import probes
from jaxpar.model.attention_context import component
from jaxpar.model.linear import add_bias
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import SEQUENCE, TENSOR, TOKEN_AXES


@flax.struct.dataclass
class Routing:
    """The experts of tokens."""

    weights: jax.Array
    """float32 [B, T, k]: weight of each of a token's experts."""
    experts: jax.Array
    """int32 [B, T, k]: their indices, the likeliest first."""
    counts: jax.Array
    """int32 [B, E]: tokens of each row of the batch that are sent to each expert."""
    probabilities: jax.Array
    """float32 [B, T, E]: scores that sum to 1 over the experts, for the balance loss."""
    log_partition: jax.Array
    """float32 [B, T]: log-sum-exp of the logits, for the z-loss."""


@jax.named_scope("router")
def route(h: jax.Array, w: dict[str, Any], of: Experts, context: Any = None) -> Routing:
    """Choose the experts of each token.

    Args:     h: [B, T, D], compute dtype. w: router [D, E]; float32 [E]: b_router if
              `Router.linear_bias`, and that of `Router.bias_on_scores`. context: for feeds.
    Source:   Shazeer et al. 2017 (1701.06538), section 2.1; Jiang et al. 2024 (2401.04088), section
              2.1; DeepSeek-AI 2024 (2412.19437), equations 13 to 16.
    """
    r = of.router
    logits = jnp.dot(h, w["router"], preferred_element_type=jnp.float32)
    logits = add_bias(logits, w.get("b_router"))
    if r.score == "softmax":
        scores = probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True)
    chosen = choose(lax.stop_gradient(scores + r.bias_on_scores(w)), of)
    experts = named_plan(chosen if context is None else probes.fed("choice", chosen, w, context))
    one_hot = jax.nn.one_hot(experts, of.num_experts)  # a product's gradient needs no scatter
    weights = jnp.sum(one_hot * scores[..., None, :], axis=-1)
    if r.normalize:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    if r.scale != 1:
        weights *= r.scale
    counts = jnp.sum(one_hot, axis=(1, 2)).astype(jnp.int32)
    log_partition = jax.scipy.special.logsumexp(logits, axis=-1)
    return Routing(weights, experts, counts, probabilities, log_partition)


def choose(scores: jax.Array, of: Experts) -> jax.Array:
    """Return the k experts with the largest scores, int32 [..., k], from float32 [..., E].

    With groups, only experts of the `Router.groups_per_token` best groups are chosen. The score of
    a group is the sum of its two best experts.
    """
    r = of.router
    if r.groups > 1:
        groups = scores.reshape(*scores.shape[:-1], r.groups, -1)
        best = jnp.sum(lax.top_k(groups, min(2, groups.shape[-1]))[0], axis=-1)
        allowed = lax.top_k(best, r.groups_per_token)[1]
        is_allowed = jnp.any(jax.nn.one_hot(allowed, r.groups, dtype=bool), axis=-2)
        scores = jnp.where(is_allowed[..., None], groups, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, of.experts_per_token)[1]


@jax.named_scope("router_losses")
def observed(
    r: Routing, rounds: jax.Array, w: dict[str, Any], context: Any, cfg: Config
) -> jax.Array:
    """Return the routing's weights, with the router's losses and the probes in their backward.

    The losses are not returned, since a layer returns only activations. Instead, the backward adds
    their gradients to those of the weights, as in Megatron's `MoEAuxLossAutoScaler`.

    Args:     rounds: int32 scalar, `Dispatch.further_rounds`.
              context: its `loss_weight` is the factor of the losses of each row (`loss_weight_of`).
              None outside training: the weights are returned as they are.
    Communication: `balance_loss`.
    """
    if context.loss_weight is None:
        return r.weights
    # All ranks of TENSOR have the same tokens, unless experts are spread over them.
    once = spreads_experts(cfg.parallel) or lax.axis_index(TENSOR) == 0
    balance, z = (
        balance_loss(r, component(context, Experts), cfg),
        jnp.sum(r.log_partition**2, axis=1),
    )
    total = cfg.train.balance_loss * balance + cfg.train.router_z_loss * z
    return probes.observe(
        "routing",
        r.weights,
        w,
        context,
        cfg,
        once=once,
        adds=((total, context.loss_weight),),
        routing=r,
        rounds=rounds,
        losses=jnp.stack([balance, z]),
    )


def balance_loss(r: Routing, of: Experts, cfg: Config) -> jax.Array:
    """Compute the balance loss of each row: float32 [B], summed over the local tokens.

    Of a set of tokens, E * sum over experts of (share of the rows) * (mean probability): 1 if
    balanced, E / k if all tokens are sent to the same experts. The set is a sequence, or all tokens
    of a microbatch, on all devices. The shares have no gradient.

    Communication: an all-reduce of the counts over SEQUENCE, or over TOKEN_AXES, and over TENSOR if
              experts are spread over it.
    Source:   Fedus et al. 2021 (2101.03961), equation 4; DeepSeek-AI 2024 (2412.19437), equation
              17, for sequences.
    """
    B, T, k = r.experts.shape
    counts, devices = r.counts, 1
    axes: tuple[str, ...] = (SEQUENCE,)
    if cfg.train.balance_over == "batch":
        counts, devices, axes = jnp.sum(counts, 0, keepdims=True), B, TOKEN_AXES
    axes = (*axes, TENSOR) if spreads_experts(cfg.parallel) else axes
    devices *= lax.axis_size(axes)
    share = psum(lax.stop_gradient(counts), axes).astype(jnp.float32) / (k * T * devices)
    return of.num_experts * jnp.sum(share * jnp.sum(r.probabilities, axis=1), axis=1)


def loss_weight_of(tokens: jax.Array, scale: jax.Array | float, num_microbatches: int) -> jax.Array:
    """Return the factor of the router's losses, so that they are means over the global batch.

    Args:     tokens: [B, T/sequence], of a microbatch. scale: factor of the loss in its backward.
    Returns:  float32 [B].
    """
    everywhere = tokens.size * num_microbatches * lax.axis_size(TOKEN_AXES)
    return jnp.full(tokens.shape[0], scale / everywhere, jnp.float32)
