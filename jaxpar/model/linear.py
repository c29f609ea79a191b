"""The matmuls of a layer, for all kinds of weights: plain, float8, or with float32 gradients.

Pure functions of local shards. Shape letters are those of `sharding/axes.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.kernels.float8.rounding import WithAmax
from jaxpar.model import lora


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a float32 bias to y, if there is one. Returns y's dtype.

    The addition is in float32, so that the gradient of the bias is summed over tokens in float32.
    """
    return y if bias is None else (y.astype(jnp.float32) + bias).astype(y.dtype)


def products(x: Any, weights: Sequence[Any], name: str, *, with_amax: bool = False) -> list[Any]:
    """Compute x times each weight.

    Arrays are multiplied here, in the compute dtype. `Float8Weight` and `Float32GradientWeight`
    implement their own products.

    Args:     x: an array, or for float8 any `Operand`. name: remat name of x, in float8 of the
              rounded x. with_amax: in float8, return the products as `WithAmax`, so that their
              gradients are too.
    """
    if isinstance(weights[0], jax.Array):
        return [x @ w for w in weights]
    return weights[0].products(x, weights, name, with_amax=with_amax)


@jax.named_scope("output")
def row_parallel(x: jax.Array | WithAmax, w: dict, weight: str, name: str) -> jax.Array:
    """Compute x times `wo` or `w_down`: this tensor rank's partial sum, [B, T, D].

    Args:     name: remat name of x.
    """
    (y,) = products(x, [w[weight]], name)
    return lora.add(y, x, w, weight)
