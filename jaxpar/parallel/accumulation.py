"""Gradient accumulation over microbatches, for a model without pipeline stages."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import vjp_segments
from jaxpar.parallel.staged_model import (
    StagedModel,
    Sums,
    add_gradients,
    float32_zeros,
    seed,
    take,
    zeros_like_type,
)
from jaxpar.sharding.params import join


def whole_model(model: StagedModel, trainable: Any, frozen: Any, mb: Any) -> Sums:
    """Compute the loss of one microbatch on a single stage: embed, all layers, head."""
    weights = join(trainable, frozen)
    top, (chunk,) = weights["top"], weights["layers"]
    passthrough = {"head": top["head"]} if "head" in trainable["top"] else {}
    x, passthrough = model.stage(chunk, model.embed(top, mb), model.context(mb), passthrough)
    return model.head(top | passthrough, x, mb)


def accumulate(
    model: StagedModel, trainable: Any, frozen: Any, microbatches: Any, scale: jax.Array
) -> tuple[Sums, Any]:
    """Compute loss and gradients, summed over microbatches.

    Args:     trainable: {"top", "layers"}, varying over every axis; layers is a tuple of one chunk.
              frozen: a tree of the same structure with the weights that have no gradients, or {}.
              microbatches: a Batch of [M, ...]. scale: the loss's cotangent, 1 / number of tokens.
    Returns:  (loss sums over the local tokens, gradients like `trainable`; float32 when M > 1).
    Communication: that of `model`.
    """

    def gradients(trainable, mb):
        sums, vjp = jax.vjp(lambda w: whole_model(model, w, frozen, mb), trainable)
        (grads,) = vjp(seed(sums, scale))
        return sums, grads

    if len(jax.tree.leaves(microbatches)[0]) == 1:
        return gradients(trainable, take(microbatches, 0))

    def body(carry, mb):
        if model.layers_per_vjp:
            sums, grads = _in_segments(model, join(trainable, frozen), carry[1], mb, scale)
        else:
            attached = dict(
                trainable, layers=tuple(model.attach(chunk, 0) for chunk in trainable["layers"])
            )
            sums, grads = gradients(attached, mb)
            grads = add_gradients(carry[1], grads)
        return (jax.tree.map(jnp.add, carry[0], sums), grads), None

    first = jax.eval_shape(lambda: gradients(trainable, take(microbatches, 0))[0])
    start = zeros_like_type(first), float32_zeros(trainable)
    return lax.scan(body, start, microbatches)[0]


def _in_segments(model: StagedModel, weights: Any, grads: Any, mb: Any, scale: jax.Array):
    """Compute one microbatch: return its loss sums, and `grads` plus its gradients.

    Each segment of layers adds its gradients in its own backward.

    Args:     weights: trainable and frozen weights. grads: float32 sums for the trainable weights.
    Communication: that of `embed`, `head` and `stage`, forward and backward.
    """
    top, (chunk,) = weights["top"], weights["layers"]
    trainable = {name: top[name] for name in grads["top"]}
    x, d_embed = jax.vjp(lambda w: model.embed(top | w, mb), trainable)
    context = model.context(mb)
    x, vjps = vjp_segments.forward(model, chunk, x, context)
    sums, d_head = jax.vjp(lambda w, x: model.head(top | w, x, mb), trainable, x)
    d_top, g = d_head(seed(sums, scale))
    at_top, g = lax.optimization_barrier((add_gradients(grads["top"], d_top), g))
    in_layers, g = vjp_segments.backward(model, chunk, grads["layers"][0], vjps, g, context)
    (d_top,) = d_embed(g)
    return sums, dict(top=add_gradients(at_top, d_top), layers=(in_layers,))
