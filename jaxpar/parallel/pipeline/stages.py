"""Collectives over the pipeline stages."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import psum, varying
from jaxpar.sharding.axes import PIPELINE


def broadcast_from_last_stage(x: jax.Array) -> jax.Array:
    """Broadcast the last pipeline stage's value to every stage.

    Args:     x: any shape; read on the last stage only.
    Communication: all-reduce over PIPELINE, and again in the backward, where the last stage
              receives the sum of the cotangents and the others zeros.
    """
    n = lax.axis_size(PIPELINE)
    if n == 1:
        return x
    own = jnp.where(lax.axis_index(PIPELINE) == n - 1, x, 0)
    return varying(psum(own, PIPELINE))


def sum_over_stages(x: jax.Array) -> jax.Array:
    """Sum over pipeline stages, with the result on every stage. Transpose: itself.

    Communication: all-reduce over PIPELINE, forward and backward.
    """
    return x if lax.axis_size(PIPELINE) == 1 else varying(psum(x, PIPELINE))
