"""Recorded routing: the experts that routers chose in a step, to be read or repeated.

    record   A weight whose gradient is the experts of the device's tokens, as `router.TALLY` is one
             whose gradient is their loads. Layers return only activations, and gradients are summed
             over microbatches and put in order by stages already.
    repeat   A frozen weight with the experts that the device's tokens shall have. The router still
             computes its own choice, the weights of the experts and the losses, so that a step does
             the same work, and its gradients are those of training.

A layer without these weights neither records nor repeats. Both are float32 [b, T/sequence, k] for
all b rows of a device, of which a microbatch, or a row group, has some. If experts are spread over
TENSOR, each of its ranks routes some of the T/sequence tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.sharding.axes import TENSOR

#: Names of the two weights.
RECORD, REPEAT = "routing_record", "routing_to_repeat"


def repeated(chosen: jax.Array, w: dict[str, Any], rows: jax.Array | None) -> jax.Array:
    """Return the experts to use: those of `REPEAT`, or else the router's choice.

    The choice by value keeps the router's own one in the program, so that it still takes its time.

    Args:     chosen: int32 [B, T, k]. rows: int32 [B], `Batch.rows`.
    """
    if REPEAT not in w:
        return chosen
    experts = w[REPEAT][rows].astype(chosen.dtype)
    if (T := chosen.shape[1]) < experts.shape[1]:
        experts = lax.dynamic_slice_in_dim(experts, lax.axis_index(TENSOR) * T, T, axis=1)
    return jnp.where(experts >= 0, experts, chosen)


def recorded(
    weights: jax.Array, experts: jax.Array, w: dict[str, Any], rows: jax.Array | None
) -> jax.Array:
    """Return the routing's weights, with the experts as the gradient of `RECORD`.

    Args:     weights: float32 [B, T, k]. experts: int32 [B, T, k]. rows: as in `repeated`.
    """
    if RECORD not in w:
        return weights
    b, whole, k = w[RECORD].shape
    T, rank, chosen = experts.shape[1], lax.axis_index(TENSOR), experts.astype(jnp.float32)
    if whole == T:
        chosen = (rank == 0) * chosen  # all its ranks have the same tokens
    else:
        empty = varying(jnp.zeros((len(chosen), whole, k), jnp.float32))
        chosen = lax.dynamic_update_slice_in_dim(empty, chosen, rank * T, axis=1)
    gradient = varying(jnp.zeros((b, whole, k), jnp.float32).at[rows].set(chosen))
    return with_gradient(weights, w[RECORD], gradient)


@jax.custom_vjp
def with_gradient(x, like, gradient):
    """Return x. In the backward, `like` has the gradient given here."""
    return x


with_gradient.defvjp(
    lambda x, like, gradient: (x, gradient), lambda gradient, d_x: (d_x, gradient, None)
)
