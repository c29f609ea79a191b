"""The matmuls of a layer, for any kind of weight: plain, float8, or with a float32 gradient.

Pure functions of local shards; shape letters as in `sharding/axes.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.kernels.float8.amax import WithAmax
from jaxpar.model import lora


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y plus a float32 bias, if there is one; y's dtype out.

    Added in float32, so that the bias's gradient, a sum over all tokens, is a float32 sum.
    """
    return y if bias is None else (y.astype(jnp.float32) + bias).astype(y.dtype)


def products(x: Any, weights: Sequence[Any], name: str, *, with_amax: bool = False) -> list[Any]:
    """x times each weight: arrays here, in the compute dtype; `Float8Weight` and
    `Float32GradientWeight` make their own.

    Args:     x: an array; of float8, any operand. name: remat name of x, and in float8 of the
              rounded x. with_amax: in float8 alone, the products are, for their gradients.
    """
    if isinstance(weights[0], jax.Array):
        return [x @ w for w in weights]
    return weights[0].products(x, weights, name, with_amax=with_amax)


@jax.named_scope("output")
def row_parallel(x: jax.Array | WithAmax, w: dict, weight: str, name: str) -> jax.Array:
    """x times `wo` or `w_down`: this tensor rank's part of a sum, [B, T, D].

    Args:     name: remat name of x.
    """
    (y,) = products(x, [w[weight]], name)
    return lora.add(y, x, w, weight)
